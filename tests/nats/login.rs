//! Reaching a server: credentials, TLS, several addresses; and that no secret is ever told.

use std::path::{Path, PathBuf};
use std::time::Duration;

use outbox_relay::config::{self, Secret};
use outbox_relay::fault::Class;
use outbox_relay::nats::connect::{ConnectFault, connect};
use rcgen::{BasicConstraints, Certificate, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use super::{Rig, SOON, settings};
use crate::harness::nats::{Nats, NatsVersion};
use crate::harness::process::free_port;

/// Would be a row of question marks in a URL.
const PASSWORD: &str = "p/4%:@ ?#[hunter2]";

async fn fault(config: &config::Nats) -> ConnectFault {
    let Err(fault) = connect(config, 16).await else { panic!("connected") };
    for text in [fault.to_string(), format!("{fault:?}")] {
        assert!(!text.contains("hunter2"), "the secret is told: {text}");
    }
    fault
}

async fn refused(config: &config::Nats, words: &str) {
    let fault = fault(config).await;
    assert_eq!(fault.class, Class::Fatal, "{fault}");
    assert!(fault.to_string().contains(words), "{fault}");
}

async fn connects(config: &config::Nats) {
    // Until a request is answered: credentials are checked after the connection.
    let rig = Rig::open(config).await;
    let stream = outbox_relay::nats::stream::Stream::new(&rig.connection, config);
    stream.ensure(config, "outbox.*.>").await.unwrap();
}

fn secret(text: &str) -> Secret {
    Secret(text.to_owned())
}

#[tokio::test]
async fn user_and_password() {
    for version in NatsVersion::ENDS {
        let server =
            Nats::start_with(version, &format!("authorization {{ user: relay, password: '{PASSWORD}' }}")).await;
        let base = settings(&server.url());
        refused(&base, "give credentials: nats.credentials_file").await;
        let mut config = base.clone();
        config.user = Some("relay".to_owned());
        config.password = Some(secret(PASSWORD));
        connects(&config).await;
        config.password = Some(secret("hunter2"));
        refused(&config, "see nats.user and nats.password_file").await;
        config.password = None;
        refused(&config, "refuses the login").await;

        let encoded = "p%2F4%25%3A%40%20%3F%23%5Bhunter2%5D";
        config = settings(&server.url().replace("://", &format!("://relay:{encoded}@")));
        connects(&config).await;
        // With another server's address before it, which cannot be reached.
        config.url.insert(0, format!("nats://relay:hunter2@127.0.0.1:{}", free_port()));
        connects(&config).await;
        config.url[1] = server.url().replace("://", "://relay:hunter2@");
        refused(&config, "refuses the login").await;
    }
}

#[tokio::test]
async fn token() {
    for version in NatsVersion::ENDS {
        let server = Nats::start_with(version, "authorization { token: 'hunter2/t' }").await;
        let mut config = settings(&server.url());
        config.token = Some(secret("hunter2/t"));
        connects(&config).await;
        config.token = Some(secret("hunter2"));
        refused(&config, "see nats.token_file").await;
        connects(&settings(&server.url().replace("://", "://hunter2%2Ft@"))).await;
    }
}

#[tokio::test]
async fn nkey() {
    let folder = tempfile::tempdir().unwrap();
    let user = nkeys::KeyPair::new_user();
    let file = folder.path().join("user.nk");
    for version in NatsVersion::ENDS {
        let authorization = format!("authorization {{ users: [ {{ nkey: {} }} ] }}", user.public_key());
        let server = Nats::start_with(version, &authorization).await;
        let mut config = settings(&server.url());
        config.nkey_file = Some(file.clone());
        std::fs::write(&file, format!("# relay\n{}\n", user.seed().unwrap())).unwrap();
        connects(&config).await;
        std::fs::write(&file, nkeys::KeyPair::new_user().seed().unwrap()).unwrap();
        refused(&config, "see nats.nkey_file").await;
        std::fs::write(&file, "SUhunter2").unwrap();
        refused(&config, "cannot sign").await;
        std::fs::write(&file, "nothing").unwrap();
        refused(&config, "holds no user seed").await;
        config.nkey_file = Some(folder.path().join("absent"));
        refused(&config, "nats.nkey_file: cannot read").await;
    }
}

#[tokio::test]
async fn credentials_file() {
    let folder = tempfile::tempdir().unwrap();
    let (operator, account, user) =
        (nkeys::KeyPair::new_operator(), nkeys::KeyPair::new_account(), nkeys::KeyPair::new_user());
    let system = nkeys::KeyPair::new_account();
    let operator_jwt = jwt(&operator, &operator, "operator", &serde_json::json!({}));
    let limits = serde_json::json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
        "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
    });
    let account_jwt = jwt(&operator, &account, "account", &serde_json::json!({ "limits": limits }));
    let system_jwt = jwt(&operator, &system, "account", &serde_json::json!({}));
    let user_jwt = jwt(&account, &user, "user", &serde_json::json!({ "subs": -1, "data": -1, "payload": -1 }));
    let seed = user.seed().unwrap();
    let file = folder.path().join("relay.creds");
    let creds = format!(
        "-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    );
    for version in NatsVersion::ENDS {
        let server = Nats::start_with(
            version,
            &format!(
                "operator: {operator_jwt}\nsystem_account: {system_key}\nresolver: MEMORY\n\
                 resolver_preload: {{ {account_key}: {account_jwt}, {system_key}: {system_jwt} }}",
                account_key = account.public_key(),
                system_key = system.public_key(),
            ),
        )
        .await;
        let mut config = settings(&server.url());
        refused(&config, "give credentials").await;
        config.credentials_file = Some(file.clone());
        std::fs::write(&file, &creds).unwrap();
        connects(&config).await;
        std::fs::write(&file, creds.replace(&seed, &nkeys::KeyPair::new_user().seed().unwrap())).unwrap();
        refused(&config, "see nats.credentials_file").await;
        std::fs::write(&file, "hunter2").unwrap();
        refused(&config, "holds no user JWT and seed").await;
        config.credentials_file = Some(folder.path().join("absent"));
        refused(&config, "nats.credentials_file: cannot read").await;
    }
}

/// A claim as `nsc` makes it (version 2 of NATS's JWTs).
fn jwt(issuer: &nkeys::KeyPair, subject: &nkeys::KeyPair, kind: &str, claim: &serde_json::Value) -> String {
    let mut nats = claim.clone();
    nats["type"] = kind.into();
    nats["version"] = 2.into();
    let claims = serde_json::json!({
        "jti": "it", "iat": 1_700_000_000, "iss": issuer.public_key(), "name": kind, "sub": subject.public_key(), "nats": nats,
    });
    let head = base64url(br#"{"typ":"JWT","alg":"ed25519-nkey"}"#);
    let signed = format!("{head}.{}", base64url(claims.to_string().as_bytes()));
    let signature = base64url(&issuer.sign(signed.as_bytes()).unwrap());
    format!("{signed}.{signature}")
}

fn base64url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let group = chunk.iter().fold(0_u32, |group, byte| group << 8 | u32::from(*byte)) << (8 * (3 - chunk.len()));
        for place in 0..=chunk.len() {
            text.push(char::from(ALPHABET[(group >> (18 - 6 * place) & 63) as usize]));
        }
    }
    text
}

/// An authority, with a server's and a client's certificate of its own.
struct Pki {
    folder: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

impl Pki {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let pki = Self { folder: tempfile::tempdir().unwrap(), authority };
        std::fs::write(pki.path("ca.pem"), pki.authority.pem()).unwrap();
        pki
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes `<name>.pem` and `<name>.key`.
    fn issue(&self, name: &str, host: &str) {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![host.to_owned()]).unwrap();
        let certificate: Certificate = params.signed_by(&key, &self.authority).unwrap();
        std::fs::write(self.path(&format!("{name}.pem")), certificate.pem()).unwrap();
        std::fs::write(self.path(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }

    fn tls(&self, name: &str, more: &str) -> String {
        let path = |end: &str| self.path(&format!("{name}.{end}")).display().to_string();
        let ca = self.path("ca.pem").display().to_string();
        format!("tls {{ cert_file: '{}', key_file: '{}', ca_file: '{ca}', {more} }}", path("pem"), path("key"))
    }
}

fn with_ca(url: &str, ca: &Path) -> config::Nats {
    let mut config = settings(url);
    config.tls_ca = Some(ca.to_owned());
    config
}

#[tokio::test]
async fn tls() {
    let (pki, stranger) = (Pki::new(), Pki::new());
    pki.issue("server", "127.0.0.1");
    pki.issue("elsewhere", "elsewhere.example");
    for version in NatsVersion::ENDS {
        let server = Nats::start_with(version, &pki.tls("server", "")).await;
        connects(&with_ca(&server.url(), &pki.path("ca.pem"))).await;
        connects(&with_ca(&server.url().replace("nats:", "tls:"), &pki.path("ca.pem"))).await;
        refused(&with_ca(&server.url(), &stranger.path("ca.pem")), "see that nats.tls_ca").await;
        // The server wants TLS, and the system's authorities do not know it.
        refused(&settings(&server.url()), "see that nats.tls_ca").await;
        refused(&with_ca(&server.url(), &pki.path("absent")), "nats.tls_ca: cannot read").await;
        refused(&with_ca(&server.url(), &pki.path("server.key")), "holds no certificate").await;
        let mut config = with_ca(&server.url(), &pki.path("ca.pem"));
        config.tls_first = true;
        refused(&config, "nats.tls_first = false").await;

        let server = Nats::start_with(version, &pki.tls("elsewhere", "")).await;
        refused(&with_ca(&server.url(), &pki.path("ca.pem")), "names the host of nats.url").await;

        let server = Nats::start_with(version, &pki.tls("server", "handshake_first: true")).await;
        let mut config = with_ca(&server.url(), &pki.path("ca.pem"));
        config.tls_first = true;
        connects(&config).await;
        config.tls_first = false;
        let fault = fault(&config).await;
        assert!(fault.to_string().contains("nats.tls_first = true"), "{fault}");

        let plain = Nats::start(version).await;
        let fault = self::fault(&with_ca(&plain.url(), &pki.path("ca.pem"))).await;
        assert!(fault.to_string().contains("TLS"), "{fault}");
    }
}

#[tokio::test]
async fn client_certificate() {
    let (pki, stranger) = (Pki::new(), Pki::new());
    pki.issue("server", "127.0.0.1");
    pki.issue("client", "relay");
    stranger.issue("client", "relay");
    for version in NatsVersion::ENDS {
        let server = Nats::start_with(version, &pki.tls("server", "verify: true")).await;
        let mut config = with_ca(&server.url(), &pki.path("ca.pem"));
        refused(&config, "nats.tls_cert").await;
        config.tls_cert = Some(pki.path("client.pem"));
        refused(&config, "only one of").await;
        config.tls_key = Some(pki.path("client.key"));
        connects(&config).await;
        config.tls_key = Some(pki.path("client.pem"));
        refused(&config, "nats.tls_key: cannot read").await;
        config.tls_key = Some(stranger.path("client.key"));
        refused(&config, "nats.tls_key").await;
        config.tls_cert = Some(stranger.path("client.pem"));
        refused(&config, "rejects the certificate of nats.tls_cert").await;
    }
}

#[tokio::test]
async fn a_server_that_is_away_is_waited_for_and_a_wrong_address_is_not() {
    let config = settings(&format!("nats://relay:hunter2@127.0.0.1:{}", free_port()));
    let fault = fault(&config).await;
    assert_eq!(fault.class, Class::Transient, "{fault}");
    assert!(fault.to_string().contains("127.0.0.1"), "{fault}");
    for url in ["http://relay:hunter2@host", "nats://relay:hunter2@ho st", "nats://", ""] {
        refused(&settings(url), "nats.url: address 1").await;
    }
}

#[tokio::test]
async fn a_password_changed_under_way_is_reported_until_it_fits_again() {
    let authorization = |password: &str| format!("authorization {{ user: relay, password: '{password}' }}");
    for version in NatsVersion::ENDS {
        let mut server = Nats::start_with(version, &authorization(PASSWORD)).await;
        let mut config = settings(&server.url());
        config.user = Some("relay".to_owned());
        config.password = Some(secret(PASSWORD));
        let rig = Rig::open(&config).await;
        let mut link = rig.connection.link();
        server.stop().await;
        server.configure(&authorization("other"));
        server.start_again().await;
        let refused = |reason: &Option<String>| {
            reason.as_ref().is_some_and(|reason| reason.contains("refuses the login") && !reason.contains("hunter2"))
        };
        let waited = link.wait_for(|link| !link.connected && refused(&link.reason));
        drop(tokio::time::timeout(SOON, waited).await.unwrap().unwrap());
        server.stop().await;
        server.configure(&authorization(PASSWORD));
        server.start_again().await;
        drop(tokio::time::timeout(SOON, link.wait_for(|link| link.connected)).await.unwrap().unwrap());
        assert_eq!((link.borrow().epoch, &link.borrow().reason), (2, &None));
    }
}

#[tokio::test]
async fn the_other_servers_of_a_cluster_are_found() {
    let ports = [free_port(), free_port()];
    let cluster = |own: usize| {
        let (own, other) = (ports[own], ports[1 - own]);
        format!("cluster {{ name: c, listen: '127.0.0.1:{own}', routes: ['nats://127.0.0.1:{other}'] }}")
    };
    let (first, second) = (cluster(0), cluster(1));
    let (mut first, second) =
        tokio::join!(Nats::start_with(NatsVersion::V2_15, &first), Nats::start_with(NatsVersion::V2_15, &second));
    // Until the first knows of the second and tells it.
    let known = second.port().to_string();
    crate::harness::wait::eventually(SOON, "the servers know each other", async || {
        first.client().await.server_info().connect_urls.iter().any(|url| url.ends_with(&known))
    })
    .await;
    let rig = Rig::open(&settings(&first.url())).await;
    let mut link = rig.connection.link();
    first.kill().await;
    let moved = link.wait_for(|link| link.connected && link.epoch == 2);
    drop(tokio::time::timeout(Duration::from_secs(10), moved).await.unwrap().unwrap());
    assert!(link.borrow().server.as_ref().unwrap().contains(&known), "{:?}", link.borrow().server);
}
