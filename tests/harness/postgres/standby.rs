//! A standby of a running server.

use super::{Postgres, command, run};

impl Postgres {
    /// Starts a standby that follows this server, as `pg_basebackup -R` sets it up, and accepts queries.
    pub async fn standby(&self) -> Self {
        let mut standby = Self::new(self.version, &self.bin, "-standby");
        let mut backup = command(&self.bin.join("pg_basebackup"), standby.server.home(), standby.user.as_ref());
        backup.args(["--no-sync", "--checkpoint=fast", "--write-recovery-conf", "--dbname"]);
        run(backup.arg(self.socket_url("postgres")).arg("--pgdata").arg(standby.data())).await;
        let config = std::fs::read_to_string(standby.data().join("postgresql.conf")).expect("postgresql.conf");
        let socket = format!("{config}\nunix_socket_directories = '{}'\n", standby.server.home().display());
        standby.write("postgresql.conf", socket.as_bytes());
        standby.begin().await;
        standby
    }
}
