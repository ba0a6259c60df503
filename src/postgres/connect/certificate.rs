//! What rustls does not tell about a certificate, or does not take.

use std::time::Duration;

use ring::digest;
use rustls::CertificateError;
use rustls_pki_types::{CertificateDer, SubjectPublicKeyInfoDer, UnixTime};
use x509_cert::der::{Decode, Encode};
use x509_cert::{Certificate, Version};

/// The certificate's hash for `tls-server-end-point`: by the hash of its signature, and by SHA-256 where that is MD5
/// or SHA-1 (RFC 5929, section 4.1). `None` where the signature has no single hash (Ed25519) or is not known here.
pub(super) fn end_point_hash(certificate: &CertificateDer<'_>) -> Option<Vec<u8>> {
    let parsed = Certificate::from_der(certificate).ok()?;
    let algorithm = match parsed.signature_algorithm.oid.to_string().as_str() {
        // RSA PKCS #1 with MD5, SHA-1, SHA-256; ECDSA with SHA-1, SHA-256.
        "1.2.840.113549.1.1.4"
        | "1.2.840.113549.1.1.5"
        | "1.2.840.113549.1.1.11"
        | "1.2.840.10045.4.1"
        | "1.2.840.10045.4.3.2" => &digest::SHA256,
        "1.2.840.113549.1.1.12" | "1.2.840.10045.4.3.3" => &digest::SHA384,
        "1.2.840.113549.1.1.13" | "1.2.840.10045.4.3.4" => &digest::SHA512,
        _ => return None,
    };
    Some(digest::digest(algorithm, certificate).as_ref().to_vec())
}

/// Whether `now` lies within the certificate's validity.
pub(super) fn check_validity(certificate: &CertificateDer<'_>, now: UnixTime) -> Result<(), rustls::Error> {
    let parsed = Certificate::from_der(certificate).map_err(|_| CertificateError::BadEncoding)?;
    let validity = parsed.tbs_certificate.validity;
    let now = Duration::from_secs(now.as_secs());
    if now < validity.not_before.to_unix_duration() {
        return Err(CertificateError::NotValidYet.into());
    }
    if now > validity.not_after.to_unix_duration() {
        return Err(CertificateError::Expired.into());
    }
    Ok(())
}

/// The key of an X.509 version 1 certificate, which rustls does not read. `openssl x509 -req` makes such ones, and
/// PostgreSQL's documentation shows that way. `None` for version 3.
pub(super) fn version_1_key(certificate: &CertificateDer<'_>) -> Option<SubjectPublicKeyInfoDer<'static>> {
    let parsed = Certificate::from_der(certificate).ok()?.tbs_certificate;
    if parsed.version != Version::V1 {
        return None;
    }
    parsed.subject_public_key_info.to_der().ok().map(SubjectPublicKeyInfoDer::from)
}
