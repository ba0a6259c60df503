//! TLS with libpq's meaning of `sslmode`, by rustls.

use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{
    WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature, verify_tls13_signature_with_raw_key,
};
use rustls::server::ParsedCertificate;
use rustls::{AlertDescription, CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::certificate;
use super::error::{ConnectError, ConnectErrorKind as Kind, quoted};
use super::target::{Roots, SslMode, Tls};

/// The protocol's registered name: servers from 17 on answer with it, older ones ignore it.
const ALPN: &[u8] = b"postgresql";

const NEEDS_17: &str = "sslnegotiation=direct needs PostgreSQL 17";

/// How much of the server's certificate is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Check {
    /// Only that the peer owns the certificate it shows.
    Nothing,
    /// That a trusted authority signed it.
    Chain,
    /// And that it is for the host that was asked for.
    ChainAndName,
}

/// Makes rustls's settings from ours. Reads the files that they name.
pub(super) fn client_config(tls: &Tls) -> Result<Arc<ClientConfig>, ConnectError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions = if tls.only_1_3 { &[&rustls::version::TLS13][..] } else { rustls::DEFAULT_VERSIONS };
    let (roots, pinned) = roots(&tls.roots)?;
    let check = match (tls.mode, &tls.roots) {
        (SslMode::VerifyFull, _) => Check::ChainAndName,
        // As libpq: an authority that is at hand is used in every mode.
        (SslMode::VerifyCa, _) | (_, Roots::File(_) | Roots::System) => Check::Chain,
        (_, Roots::None(_)) => Check::Nothing,
    };
    let verifier = Verifier { check, roots, pinned, algorithms: provider.signature_verification_algorithms };
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)
        .map_err(|error| ConnectError::new(Kind::Settings, format!("TLS cannot be set up: {error}")))?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut config = match &tls.client {
        None => builder.with_no_client_auth(),
        Some((certificate, key)) => {
            let chain = certificates("sslcert", certificate)?;
            builder.with_client_auth_cert(chain, private_key(key)?).map_err(|error| {
                let (certificate, key) = (certificate.display(), key.display());
                let what = format!("sslcert {certificate} and sslkey {key} do not make a pair: {error}");
                ConnectError::new(Kind::Settings, what)
            })?
        }
    };
    config.enable_sni = tls.send_name;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Arc::new(config))
}

/// Shakes hands. Nothing has been read past the server's `S`, so no plaintext that someone slipped in after it can
/// pass for a part of the session (CVE-2021-23222): rustls would see it as a broken record.
pub(super) async fn handshake(
    stream: TcpStream,
    config: Arc<ClientConfig>,
    host: &str,
    direct: bool,
) -> Result<TlsStream<TcpStream>, ConnectError> {
    let name = ServerName::try_from(host.to_owned())
        .map_err(|_| ConnectError::new(Kind::Settings, format!("{} is not a host name", quoted(host))))?;
    let stream = TlsConnector::from(config).connect(name, stream).await.map_err(|error| {
        let error = ConnectError::io("during the TLS handshake", &error);
        // A server before 17 takes the first TLS record for a broken startup packet and hangs up.
        if direct && error.kind() == Kind::Unreachable { error.hint(NEEDS_17) } else { error }
    })?;
    if direct && stream.get_ref().1.alpn_protocol() != Some(ALPN) {
        let what = "the TLS server does not say that it speaks PostgreSQL's protocol";
        return Err(ConnectError::new(Kind::Tls, what).hint(NEEDS_17));
    }
    Ok(stream)
}

/// The `tls-server-end-point` hash of the certificate that the server showed (RFC 5929).
pub(super) fn end_point(stream: &TlsStream<TcpStream>) -> Option<Vec<u8>> {
    certificate::end_point_hash(stream.get_ref().1.peer_certificates()?.first()?)
}

/// Trust anchors, and the certificates they came from.
fn roots(roots: &Roots) -> Result<(RootCertStore, Vec<CertificateDer<'static>>), ConnectError> {
    let mut store = RootCertStore::empty();
    match roots {
        Roots::None(_) => Ok((store, Vec::new())),
        Roots::System => {
            let found = rustls_native_certs::load_native_certs();
            store.add_parsable_certificates(found.certs);
            if store.is_empty() {
                let what = "sslrootcert=system: the system has no certificate authorities";
                return Err(ConnectError::new(Kind::Settings, what).hint("install ca-certificates"));
            }
            Ok((store, Vec::new()))
        }
        Roots::File(file) => {
            let certificates = certificates("sslrootcert", file)?;
            for certificate in &certificates {
                store.add(certificate.clone()).map_err(|error| unreadable("sslrootcert", file, &error))?;
            }
            Ok((store, certificates))
        }
    }
}

fn certificates(key: &str, file: &Path) -> Result<Vec<CertificateDer<'static>>, ConnectError> {
    let found: Vec<_> = CertificateDer::pem_file_iter(file)
        .and_then(Iterator::collect)
        .map_err(|error| unreadable(key, file, &error))?;
    if found.is_empty() {
        return Err(unreadable(key, file, &"it holds no PEM certificate"));
    }
    Ok(found)
}

fn private_key(file: &Path) -> Result<PrivateKeyDer<'static>, ConnectError> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let metadata = std::fs::metadata(file).map_err(|error| unreadable("sslkey", file, &error))?;
        // As libpq: root may own the key and let a group read it.
        let forbidden = if metadata.uid() == 0 { 0o027 } else { 0o077 };
        if metadata.mode() & forbidden != 0 {
            let what = format!("sslkey: others may read the key file {}", file.display());
            return Err(ConnectError::new(Kind::Settings, what).hint("chmod 0600 (0640 when root owns it)"));
        }
    }
    PrivateKeyDer::from_pem_file(file).map_err(|error| unreadable("sslkey", file, &error))
}

fn unreadable(key: &str, file: &Path, error: &dyn std::fmt::Display) -> ConnectError {
    ConnectError::new(Kind::Settings, format!("{key}: the file {} cannot be used: {error}", file.display()))
}

#[derive(Debug)]
struct Verifier {
    check: Check,
    roots: RootCertStore,
    pinned: Vec<CertificateDer<'static>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        if self.check == Check::Nothing {
            return Ok(ServerCertVerified::assertion());
        }
        let parsed = ParsedCertificate::try_from(end_entity)?;
        if self.pinned.iter().any(|pinned| pinned == end_entity) {
            // A self-signed server certificate that is itself named as the authority needs no chain, but it ends too.
            certificate::check_validity(end_entity, now)?;
        } else {
            verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, self.algorithms.all)?;
        }
        if self.check == Check::ChainAndName {
            verify_server_name(&parsed, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    // Signatures are checked in every mode: channel binding rests on the peer owning the certificate that it shows.
    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        match certificate::version_1_key(certificate) {
            Some(key) => verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms),
            None => verify_tls13_signature(message, certificate, signature, &self.algorithms),
        }
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

/// What a failed handshake means for the operator.
pub(super) fn explain(error: &rustls::Error) -> ConnectError {
    let (what, hint) = match error {
        rustls::Error::InvalidCertificate(reason) => match reason {
            CertificateError::UnknownIssuer => (
                "the server's certificate is not signed by a trusted authority".to_owned(),
                "sslrootcert must hold the certificate of the authority that signed the server's",
            ),
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => (
                format!("the server's certificate is for another host: {reason}"),
                "connect by a name that stands in the certificate's subjectAltName (hostaddr can give the address), \
                 or use sslmode=verify-ca",
            ),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                (format!("the server's certificate has expired: {reason}"), "renew it, and check this machine's clock")
            }
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                (format!("the server's certificate is not valid yet: {reason}"), "check this machine's clock")
            }
            _ => (
                format!("the server's certificate cannot be accepted: {reason}"),
                "it must be an X.509 version 3 certificate for server use with a subjectAltName",
            ),
        },
        rustls::Error::AlertReceived(
            AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::CertificateUnknown
            | AlertDescription::UnknownCA
            | AlertDescription::CertificateExpired
            | AlertDescription::AccessDenied,
        ) => (
            format!("the server refused the relay's certificate: {error}"),
            "check sslcert and sslkey, and the server's ssl_ca_file",
        ),
        rustls::Error::AlertReceived(AlertDescription::NoApplicationProtocol) => {
            (format!("the TLS server is not PostgreSQL's: {error}"), "check host and port")
        }
        _ => (format!("TLS failed: {error}"), "check that the server offers TLS 1.2 or later on this port"),
    };
    ConnectError::new(Kind::Tls, what).hint(hint)
}
