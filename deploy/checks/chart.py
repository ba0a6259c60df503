"""Lints the chart and renders it with its own values and with each file of ci/, one file of manifests each.

chart.py CHART FOLDER
"""

import sys
from pathlib import Path

import helm_python as helm
import yaml

chart_path, folder = Path(sys.argv[1]), Path(sys.argv[2])
faults = []

# What the schema must refuse: a mistyped key, a setting that there is not, a secret among the settings.
REFUSED = [
    {"replica": 2},
    {"settings": {"nats": {"ulr": "nats://nats:4222"}}},
    {"settings": {"postgres": {"password": "x"}}},
    {"settings": {"admin": {"listen": "off"}}},
    {"secretFiles": [{"setting": "postgres.passwd_file", "secret": "s", "key": "k"}]},
    {"terminationGracePeriodSeconds": 20},
    {"migrate": {"enabled": True}},
]

with helm.Chart.load(chart_path) as chart:
    for name, values in [("default", {})] + [
        (path.stem, yaml.safe_load(path.read_text())) for path in sorted((chart_path / "ci").glob("*.yaml"))
    ]:
        report = helm.lint(chart_path, values, strict=True)
        # 1 is information, such as that there is no icon.
        faults += [f"{name}: {m['path']}: {m['error']}" for m in report["messages"] if m["severity"] > 1]
        faults += [f"{name}: {error}" for error in report["errors"]]
        chart.validate_schema(values)
        rendered = chart.render(values, name="shop", namespace="shop")
        manifests = [text for path, text in sorted(rendered.items()) if path.endswith(".yaml") and text.strip()]
        target = folder / f"{name}.yaml"
        target.write_text("---\n".join(text if text.endswith("\n") else text + "\n" for text in manifests))
        kinds = [manifest["kind"] for manifest in yaml.safe_load_all(target.read_text()) if manifest]
        print(f"{name}: {', '.join(kinds)}")
        for number, manifest in enumerate(m for m in yaml.safe_load_all(target.read_text()) if m):
            kind = manifest["kind"]
            if kind == "PrometheusRule":
                (folder / f"{name}.rules.yaml").write_text(yaml.safe_dump(manifest["spec"]))
            elif kind == "ConfigMap":
                (folder / f"{name}.toml").write_text(manifest["data"]["relay.toml"])
            # Custom resources have no schema here; the others go to kubernetes-validate one by one.
            if "monitoring.coreos.com" not in manifest["apiVersion"]:
                (folder / f"{name}-{number}-{kind}.k8s.yaml").write_text(yaml.safe_dump(manifest))
    for values in REFUSED:
        try:
            chart.validate_schema(values)
            chart.render(values, name="shop", namespace="shop")
            faults.append(f"these values should be refused: {values}")
        except helm.HelmError:
            pass

sys.exit("\n".join(faults) or None)
