use super::*;

fn parse_with(conninfo: &str, password: Option<&str>, variables: &[(&str, &str)]) -> Result<Target, ConnectInfoError> {
    let environment = Environment {
        variable: &|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        },
        os_user: Some("me".to_owned()),
        home: Some(PathBuf::from("/nowhere/home")),
    };
    Target::parse_in(conninfo, password, &environment)
}

fn parse(conninfo: &str) -> Target {
    parse_with(conninfo, None, &[]).unwrap()
}

fn mistake(conninfo: &str) -> String {
    parse_with(conninfo, None, &[]).unwrap_err().to_string()
}

fn password(target: &Target) -> Option<&str> {
    target.password.as_ref().map(|secret| secret.0.as_str())
}

#[test]
fn describes_without_secrets() {
    for (conninfo, expected) in [
        ("postgres://u:s3cret@h/d", r#"user "u", database "d" at h:5432"#),
        ("postgres://u:s3cret@h", r#"user "u", database "u" at h:5432"#),
        ("postgres://h", r#"user "me", database "me" at h:5432"#),
        ("postgres://u@[::1]:5433,b,c:1/d", r#"user "u", database "d" at [::1]:5433, b:5432, c:1"#),
        ("host=a,b port=7 user=u", r#"user "u", database "u" at a:7, b:7"#),
        ("host=/run/pg,b port=1,2 user=u", r#"user "u", database "u" at /run/pg/.s.PGSQL.1, b:2"#),
        ("hostaddr=10.0.0.1 user=u", r#"user "u", database "u" at 10.0.0.1:5432"#),
        ("postgres://%2Frun%2Fpg/d?user=u", r#"user "u", database "d" at /run/pg/.s.PGSQL.5432"#),
    ] {
        let target = parse(conninfo);
        assert_eq!(target.describe(), expected, "{conninfo}");
        assert!(!format!("{target:?}").contains("s3cret"));
    }
}

#[test]
fn address_beside_the_name() {
    let target = parse("host=db.example hostaddr=10.0.0.1");
    let address = Some("10.0.0.1".parse().unwrap());
    assert_eq!(target.hosts, [Host { place: Place::Tcp { name: "db.example".to_owned(), address }, port: 5432 }]);
}

#[test]
fn the_password_of_case_21() {
    let expected = Some(r"%I\GYg-7a@:/?#{y ");
    for conninfo in
        ["postgres://u:%25I%5CGYg-7a%40%3A%2F%3F%23%7By%20@h/d", r"host=h user=u password='%I\\GYg-7a@:/?#{y '"]
    {
        assert_eq!(password(&parse(conninfo)), expected, "{conninfo}");
    }
}

#[test]
fn what_wins() {
    let variables = [("PGPASSWORD", "env"), ("PGHOST", "envhost"), ("PGSSLMODE", "disable"), ("PGPORT", "6")];
    let target = parse_with("postgres://u:url@h/d", Some("override"), &variables).unwrap();
    assert_eq!(password(&target), Some("override"));
    let target = parse_with("postgres://u:url@h/d", None, &variables).unwrap();
    assert_eq!(password(&target), Some("url"));
    let target = parse_with("user=u", None, &variables).unwrap();
    assert_eq!(password(&target), Some("env"));
    assert_eq!(target.describe(), r#"user "u", database "u" at envhost:6"#);
    assert_eq!(target.tls.mode, SslMode::Disable);
    assert_eq!(parse("user=u").passfile, Some("/nowhere/home/.pgpass".into()));
    assert_eq!(parse_with("user=u", None, &[("PGPASSFILE", "/p")]).unwrap().passfile, Some("/p".into()));
}

#[test]
fn defaults() {
    let target = parse("host=h");
    assert_eq!(target.tls.mode, SslMode::Prefer);
    assert_eq!(target.session, SessionAttrs::Any);
    assert_eq!(target.connect_timeout, Some(Duration::from_secs(10)));
    assert_eq!(target.channel_binding, ChannelBinding::Prefer);
    assert_eq!(parse("host=a,b").session, SessionAttrs::ReadWrite);
    assert_eq!(parse("host=a,b target_session_attrs=any").session, SessionAttrs::Any);
    assert_eq!(parse("host=h connect_timeout=0").connect_timeout, None);
    assert_eq!(parse("host=h sslrootcert=system").tls.mode, SslMode::VerifyFull);
    let tcp = parse("host=h keepalives_idle=0 tcp_user_timeout=1500 keepalives_count=9").tcp;
    assert_eq!((tcp.idle, tcp.user_timeout, tcp.count), (None, Some(Duration::from_millis(1500)), Some(9)));
}

#[test]
fn mistakes_name_the_parameter() {
    for (conninfo, expected) in [
        ("host=h nonsense=1", "`nonsense`"),
        ("postgres://h/d?service=x", "`service`"),
        ("host=h replication=database", "`replication`"),
        ("host=h sslmode=maybe", "`sslmode`"),
        ("host=h sslmode=verify-full", "`sslrootcert`"),
        ("host=h sslmode=require sslrootcert=system", "sslmode=verify-full"),
        ("host=h sslmode=prefer sslnegotiation=direct", "sslnegotiation=direct"),
        ("host=h sslcert=/c", "`sslkey`"),
        ("host=h channel_binding=yes", "`channel_binding`"),
        ("host=h connect_timeout=soon", "`connect_timeout`"),
        ("host=h target_session_attrs=x", "`target_session_attrs`"),
        ("host=h port=0", "`port`"),
        ("host=h port=70000", "`port`"),
        ("host=a,b,c port=1,2", "2 ports for 3 hosts"),
        ("host=a,b hostaddr=1.1.1.1", "`hostaddr`"),
        ("hostaddr=h", "`hostaddr`"),
        ("host=h client_encoding=latin1", "`client_encoding`"),
        ("host=h gssencmode=require", "`gssencmode`"),
        ("host=@abstract", "`host`"),
    ] {
        let shown = mistake(conninfo);
        assert!(shown.contains(expected), "{conninfo}: {shown}");
    }
}

#[test]
fn names_in_the_password_file() {
    for (conninfo, expected) in [
        ("host=h hostaddr=10.0.0.1", "h"),
        ("hostaddr=10.0.0.1", "10.0.0.1"),
        ("host=/var/run/postgresql", "localhost"),
        ("host=/tmp", "/tmp"),
    ] {
        assert_eq!(parse(conninfo).hosts[0].pgpass_name(), expected, "{conninfo}");
    }
}
