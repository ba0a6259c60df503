//! Encryption as `sslmode` says, on both kinds of connection. The newest server here is 17, and 15 the oldest: the
//! wheel of 18 comes without SSL.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use outbox_relay::postgres::connect::ConnectErrorKind as Kind;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    PKCS_ECDSA_P256_SHA256, PKCS_ECDSA_P384_SHA384, PKCS_ED25519, SignatureAlgorithm,
};
use tempfile::TempDir;
use x509_cert::der::pem::{LineEnding, encode_string};

use super::{PASSWORD_IN_URL, admits, open, refuses, server_with_roles};
use crate::harness::postgres::{PgVersion, Postgres};

const WITH_TLS: [PgVersion; 2] = [PgVersion::V15, PgVersion::V17];

/// Only encrypted sessions get in over TCP, but for the tests' own and for `plain`.
const HBA: &str = "local all all trust
    host all postgres 127.0.0.1/32 trust
    hostssl all certified all cert
    hostssl all scram all scram-sha-256
    hostssl all md5er all md5
    hostssl all clear all password
    hostssl all stranger all trust
    hostnossl all plain all trust
";

/// A certificate authority, with a folder for what it makes.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    folder: TempDir,
}

impl Authority {
    fn new(name: &str, algorithm: &'static SignatureAlgorithm) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let key = KeyPair::generate_for(algorithm).unwrap();
        let mut params = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        std::fs::write(folder.path().join("ca.crt"), pem("CERTIFICATE", params.self_signed(&key).unwrap().der()))
            .unwrap();
        Self { issuer: Issuer::new(params, key), folder }
    }

    fn certificate(&self) -> PathBuf {
        self.folder.path().join("ca.crt")
    }

    /// Certificate and key in PEM.
    fn sign(&self, params: &CertificateParams) -> (String, String) {
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        (pem("CERTIFICATE", params.signed_by(&key, &self.issuer).unwrap().der()), private(&key))
    }

    /// `sslcert` and `sslkey` for a role.
    fn client(&self, role: &str) -> (PathBuf, PathBuf) {
        let mut params = named(role);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let (certificate, key) = self.sign(&params);
        let path = |extension: &str| self.folder.path().join(format!("{role}.{extension}"));
        std::fs::write(path("crt"), certificate).unwrap();
        std::fs::write(path("key"), key).unwrap();
        std::fs::set_permissions(path("key"), std::fs::Permissions::from_mode(0o600)).unwrap();
        (path("crt"), path("key"))
    }
}

fn pem(label: &'static str, der: &[u8]) -> String {
    encode_string(label, LineEnding::LF, der).unwrap()
}

fn private(key: &KeyPair) -> String {
    pem("PRIVATE KEY", &key.serialize_der())
}

fn named(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

/// For `localhost` and 127.0.0.1, and for no other name of this machine.
fn server_params() -> CertificateParams {
    let mut params = CertificateParams::new(["localhost".to_owned(), "127.0.0.1".to_owned()]).unwrap();
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    params
}

async fn server(version: PgVersion, authority: &Authority, params: &CertificateParams) -> Postgres {
    let server = server_with_roles(version, &[("listen_addresses", "127.0.0.1,::1")], HBA).await;
    server.client().await.batch_execute("CREATE ROLE certified LOGIN REPLICATION").await.unwrap();
    server.write("root.crt", &std::fs::read(authority.certificate()).unwrap());
    server.reload("ssl_ca_file", "root.crt").await;
    use_certificate(&server, authority.sign(params)).await;
    server
}

/// Gives the server another certificate. The old one is in use until all is loaded.
async fn use_certificate(server: &Postgres, (certificate, key): (String, String)) {
    server.write("server.crt", certificate.as_bytes());
    server.write("server.key", key.as_bytes());
    server.reload("ssl", "on").await;
}

fn url(role: &str, host: &str, server: &Postgres, rest: &str) -> String {
    format!("postgres://{role}:{PASSWORD_IN_URL}@{host}:{}/postgres?{rest}", server.port())
}

fn trusting(mode: &str, authority: &Path) -> String {
    format!("sslmode={mode}&sslrootcert={}", authority.display())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sslmode_means_what_libpq_means() {
    let authority = Authority::new("ours", &PKCS_ECDSA_P256_SHA256);
    let other = Authority::new("others", &PKCS_ECDSA_P256_SHA256);
    let (right, wrong) = (authority.certificate(), other.certificate());
    for version in WITH_TLS {
        let server = server(version, &authority, &server_params()).await;
        let scram = |host: &str, rest: &str| url("scram", host, &server, rest);
        for mode in ["allow", "prefer", "require"] {
            admits(&scram("127.0.0.1", &format!("sslmode={mode}"))).await;
            // A role that only gets in without encryption: a second try is for allow and prefer alone.
            let plain = url("plain", "127.0.0.1", &server, &format!("sslmode={mode}"));
            let statements = open(&plain).await.0;
            assert_eq!(statements.is_ok(), mode != "require", "{mode}");
        }
        refuses(&scram("127.0.0.1", "sslmode=disable"), Kind::NotAdmitted, "no encryption").await;
        admits(&url("md5er", "localhost", &server, "sslmode=require")).await;
        admits(&url("clear", "localhost", &server, "sslmode=require")).await;

        for (mode, host) in
            [("require", "[::1]"), ("verify-ca", "[::1]"), ("verify-full", "127.0.0.1"), ("verify-full", "localhost")]
        {
            admits(&scram(host, &trusting(mode, &right))).await;
        }
        admits(&scram("localhost", &format!("{}&hostaddr=127.0.0.1", trusting("verify-full", &right)))).await;
        // Case 22.
        for mode in ["require", "verify-ca", "verify-full"] {
            refuses(&scram("localhost", &trusting(mode, &wrong)), Kind::Tls, "trusted authority").await;
        }
        refuses(&scram("[::1]", &trusting("verify-full", &right)), Kind::Tls, "another host").await;
        let misnamed = format!("{}&hostaddr=127.0.0.1", trusting("verify-full", &right));
        refuses(&scram("db.example", &misnamed), Kind::Tls, "db.example").await;
        let missing = trusting("require", Path::new("/nowhere/ca.crt"));
        refuses(&scram("localhost", &missing), Kind::Settings, "sslrootcert: the file /nowhere/ca.crt").await;
        let public = scram("localhost", "sslrootcert=system");
        refuses(&public, Kind::Tls, "trusted authority").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_that_are_out_of_order() {
    let authority = Authority::new("ours", &PKCS_ECDSA_P256_SHA256);
    let server = server(PgVersion::V17, &authority, &server_params()).await;
    let strict = url("scram", "localhost", &server, &trusting("verify-full", &authority.certificate()));
    admits(&strict).await;

    let mut params = server_params();
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
    use_certificate(&server, authority.sign(&params)).await;
    refuses(&strict, Kind::Tls, "has expired").await;
    let mut params = server_params();
    params.not_before = rcgen::date_time_ymd(2090, 1, 1);
    params.not_after = rcgen::date_time_ymd(2091, 1, 1);
    use_certificate(&server, authority.sign(&params)).await;
    refuses(&strict, Kind::Tls, "not valid yet").await;

    // Signed by itself, and itself named as the authority: as many set-ups have it.
    for is_ca in [IsCa::NoCa, IsCa::Ca(BasicConstraints::Unconstrained)] {
        let mut params = server_params();
        params.is_ca = is_ca;
        let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        let certificate = pem("CERTIFICATE", params.self_signed(&key).unwrap().der());
        let pinned = authority.folder.path().join("pinned.crt");
        std::fs::write(&pinned, &certificate).unwrap();
        use_certificate(&server, (certificate, private(&key))).await;
        admits(&url("scram", "localhost", &server, &trusting("verify-full", &pinned))).await;
        refuses(&url("scram", "[::1]", &server, &trusting("verify-full", &pinned)), Kind::Tls, "another host").await;
        refuses(&strict, Kind::Tls, "certificate").await;
    }
}

/// For `CN=localhost`, of X.509 version 1, as `openssl x509 -req` of OpenSSL 3.0 makes them. Valid for 100 years.
const VERSION_1: (&str, &str) = (
    "-----BEGIN CERTIFICATE-----\n\
     MIIBHTCBxAIUb6cET2jlUwDhg/LN1rxovB5Zp0cwCgYIKoZIzj0EAwIwDTELMAkG\n\
     A1UEAwwCY2EwIBcNMjYxMTI5MjEyOTI3WhgPMjEyNjExMDUyMTI5MjdaMBQxEjAQ\n\
     BgNVBAMMCWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABC9w8m/9\n\
     A5/DOle8+P1TjWFTko2SGNWLflH+9/+gMQBZjv0R+YCxSvpWuPuk/j34alWFu99e\n\
     g2PAX3TBni8tp7YwCgYIKoZIzj0EAwIDSAAwRQIhAJbqln0t19K5VOiwV4d9nz6x\n\
     UycVqEmM4Ys037e9BFC4AiBDWztm+LGM4I4brEPTqC+M1mM2XTbvZUVMyh3pVAkL\n\
     cw==\n\
     -----END CERTIFICATE-----\n",
    "-----BEGIN PRIVATE KEY-----\n\
     MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg8kyJrzAFh3sN5Rnz\n\
     b9M0CXwV98JZj9YzQUBpzUx4lUehRANCAAQvcPJv/QOfwzpXvPj9U41hU5KNkhjV\n\
     i35R/vf/oDEAWY79EfmAsUr6Vrj7pP49+GpVhbvfXoNjwF90wZ4vLae2\n\
     -----END PRIVATE KEY-----\n",
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_old_form_of_certificate_still_encrypts() {
    let authority = Authority::new("ours", &PKCS_ECDSA_P256_SHA256);
    let server = server(PgVersion::V15, &authority, &server_params()).await;
    use_certificate(&server, (VERSION_1.0.to_owned(), VERSION_1.1.to_owned())).await;
    admits(&url("scram", "localhost", &server, "sslmode=require&channel_binding=require")).await;
    let strict = trusting("verify-full", &authority.certificate());
    refuses(&url("scram", "localhost", &server, &strict), Kind::Tls, "version 3").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn channel_binding() {
    for version in WITH_TLS {
        // The server checks the hash that we send, so that it lets us in proves that both took the same one.
        for algorithm in [&PKCS_ECDSA_P256_SHA256, &PKCS_ECDSA_P384_SHA384] {
            let authority = Authority::new("ours", algorithm);
            let server = server(version, &authority, &server_params()).await;
            let rest = format!("{}&channel_binding=require", trusting("verify-full", &authority.certificate()));
            admits(&url("scram", "localhost", &server, &rest)).await;
            admits(&url("scram", "localhost", &server, "sslmode=require&channel_binding=require")).await;
            admits(&url("scram", "localhost", &server, "sslmode=require&channel_binding=disable")).await;
            for role in ["md5er", "clear", "stranger"] {
                refuses(&url(role, "localhost", &server, &rest), Kind::Authentication, "channel_binding=require").await;
            }
        }
    }
    // No hash is defined for Ed25519.
    let authority = Authority::new("ours", &PKCS_ED25519);
    let server = server(PgVersion::V17, &authority, &server_params()).await;
    admits(&url("scram", "localhost", &server, &trusting("verify-full", &authority.certificate()))).await;
    let rest = "sslmode=require&channel_binding=require";
    refuses(&url("scram", "localhost", &server, rest), Kind::Authentication, "signature").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_certificates() {
    let authority = Authority::new("ours", &PKCS_ECDSA_P256_SHA256);
    let stranger = Authority::new("others", &PKCS_ECDSA_P256_SHA256);
    for version in WITH_TLS {
        let server = server(version, &authority, &server_params()).await;
        let with = |(certificate, key): &(PathBuf, PathBuf)| {
            let rest = format!("sslmode=require&sslcert={}&sslkey={}", certificate.display(), key.display());
            url("certified", "localhost", &server, &rest)
        };
        let good = authority.client("certified");
        admits(&with(&good)).await;
        refuses(&with(&authority.client("another")), Kind::NotAdmitted, "certificate").await;
        refuses(&with(&stranger.client("certified")), Kind::Tls, "refused the relay's certificate").await;
        let none = url("certified", "localhost", &server, "sslmode=require");
        refuses(&none, Kind::NotAdmitted, "sslcert").await;
        let mixed = (good.0.clone(), authority.client("another").1);
        refuses(&with(&mixed), Kind::Settings, "do not make a pair").await;
        std::fs::set_permissions(&good.1, std::fs::Permissions::from_mode(0o644)).unwrap();
        refuses(&with(&good), Kind::Settings, "others may read").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_from_the_first_byte() {
    let authority = Authority::new("ours", &PKCS_ECDSA_P256_SHA256);
    let rest = format!("{}&sslnegotiation=direct", trusting("verify-full", &authority.certificate()));
    let new = server(PgVersion::V17, &authority, &server_params()).await;
    admits(&url("scram", "localhost", &new, &rest)).await;
    let old = server(PgVersion::V15, &authority, &server_params()).await;
    let (statements, replicating) = open(&url("scram", "localhost", &old, &rest)).await;
    for error in [statements.unwrap_err(), replicating.unwrap_err()] {
        assert!(error.to_string().contains("PostgreSQL 17"), "{error}");
    }
}

/// A plain server that answers the request for TLS with `answer`.
async fn answering(answer: &'static [u8]) -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut request = [0; 8];
                let _ = tokio::io::AsyncReadExt::read_exact(&mut stream, &mut request).await;
                let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, answer).await;
                let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
            });
        }
    });
    port
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_man_in_the_middle_before_the_handshake() {
    // AuthenticationOk in the clear behind the S (CVE-2021-23222).
    let port = answering(b"SR\0\0\0\x08\0\0\0\0").await;
    refuses(&format!("postgres://u@127.0.0.1:{port}/d?sslmode=require"), Kind::Tls, "TLS failed").await;
    let port = answering(b"E\0\0\0\x20SFATAL\0C28P01\0Mbelieve me\0\0").await;
    let conninfo = format!("postgres://u@127.0.0.1:{port}/d?sslmode=require");
    refuses(&conninfo, Kind::Unreachable, "answered the TLS request by an error").await;
    let port = answering(b"X").await;
    refuses(&format!("postgres://u@127.0.0.1:{port}/d"), Kind::Protocol, "request for TLS").await;
}
