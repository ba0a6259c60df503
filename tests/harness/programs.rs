//! Where the server programs are: what `deploy/dev/fetch` unpacked, or what `PG_BIN` and `NATS_SERVER` name.

use std::path::{Path, PathBuf};

/// A PostgreSQL version that the tests run against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PgVersion {
    V15,
    V17,
    V18,
}

impl PgVersion {
    /// The oldest and the newest that the relay supports.
    pub const ENDS: [Self; 2] = [Self::V15, Self::V18];

    /// The major version.
    pub const fn major(self) -> u32 {
        match self {
            Self::V15 => 15,
            Self::V17 => 17,
            Self::V18 => 18,
        }
    }

    /// The folder with `initdb` and `postgres`. `PG_BIN` stands for the default version, 18.
    pub fn bin(self) -> PathBuf {
        if self == Self::V18
            && let Some(bin) = std::env::var_os("PG_BIN")
        {
            return PathBuf::from(bin);
        }
        let bin = folder().join(format!("postgres-{}", self.major())).join("bin");
        demand(&bin.join("postgres"), &format!("postgres:{}", self.major()));
        bin
    }
}

/// A nats-server version that the tests run against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NatsVersion {
    V2_10,
    V2_15,
}

impl NatsVersion {
    /// The oldest and the newest that the relay supports.
    pub const ENDS: [Self; 2] = [Self::V2_10, Self::V2_15];

    /// As `nats-server --version` begins.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V2_10 => "2.10",
            Self::V2_15 => "2.15",
        }
    }

    /// The program. `NATS_SERVER` stands for the default version, 2.15.
    pub fn program(self) -> PathBuf {
        if self == Self::V2_15
            && let Some(program) = std::env::var_os("NATS_SERVER")
        {
            return PathBuf::from(program);
        }
        let program = folder().join(format!("nats-{}", self.name())).join("nats-server");
        demand(&program, &format!("nats:{}", self.name()));
        program
    }
}

fn folder() -> PathBuf {
    std::env::var_os("OUTBOX_RELAY_SERVERS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join(".servers"), PathBuf::from)
}

fn demand(program: &Path, server: &str) {
    assert!(
        program.is_file(),
        "{} is missing: `make test` fetches the servers that the tests need (or: deploy/dev/fetch {server})",
        program.display()
    );
}
