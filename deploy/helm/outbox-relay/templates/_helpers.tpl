{{- define "outbox-relay.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "outbox-relay.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "outbox-relay.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "outbox-relay.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "outbox-relay.selector" -}}
app.kubernetes.io/name: {{ include "outbox-relay.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "outbox-relay.labels" -}}
{{ include "outbox-relay.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "outbox-relay.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- define "outbox-relay.serviceAccount" -}}
{{- default (ternary (include "outbox-relay.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* A value as TOML writes it. Numbers come from YAML as floats; no setting is one. */}}
{{- define "outbox-relay.toml" -}}
{{- if kindIs "float64" . -}}{{ int64 . }}{{- else -}}{{ toRawJson . }}{{- end -}}
{{- end -}}

{{/* relay.toml */}}
{{- define "outbox-relay.settings" -}}
{{- range $section, $keys := .Values.settings }}
[{{ $section }}]
{{- range $key, $value := $keys }}
{{- if not (kindIs "map" $value) }}
{{ $key }} = {{ include "outbox-relay.toml" $value }}
{{- end }}
{{- end }}
{{- range $name, $table := $keys }}
{{- if kindIs "map" $table }}

[{{ $section }}.{{ $name }}]
{{- range $key, $value := $table }}
{{ $key }} = {{ include "outbox-relay.toml" $value }}
{{- end }}
{{- end }}
{{- end }}
{{ end }}
{{- end -}}

{{/* The variable of a setting, such as OUTBOX_RELAY_POSTGRES__PASSWORD_FILE. */}}
{{- define "outbox-relay.variable" -}}
{{- printf "OUTBOX_RELAY_%s" (. | upper | replace "." "__") -}}
{{- end -}}

{{- define "outbox-relay.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "outbox-relay.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}
