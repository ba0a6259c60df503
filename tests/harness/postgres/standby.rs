//! A standby of a running server.

use super::{Postgres, User, command, free_port, new_folder, run, tail};

impl Postgres {
    /// Starts a standby that follows this server, as `pg_basebackup -R` sets it up, and accepts queries.
    pub async fn standby(&self) -> Self {
        let user = User::instead_of_root();
        let home = new_folder(&format!("postgres-{}-standby", self.version.major()), user.as_ref());
        let mut standby = Self { version: self.version, bin: self.bin.clone(), home, port: 0, user, process: None };
        let mut backup = command(&self.bin.join("pg_basebackup"), &standby.home, standby.user.as_ref());
        backup.args(["--no-sync", "--checkpoint=fast", "--write-recovery-conf", "--dbname"]);
        run(backup.arg(self.socket_url("postgres")).arg("--pgdata").arg(standby.data())).await;
        let config = std::fs::read_to_string(standby.data().join("postgresql.conf")).expect("postgresql.conf");
        let socket = format!("{config}\nunix_socket_directories = '{}'\n", standby.home.display());
        standby.write("postgresql.conf", socket.as_bytes());
        for _ in 0..3 {
            standby.port = free_port();
            standby.set_port();
            if standby.try_start().await {
                return standby;
            }
        }
        panic!("the standby found no free port:\n{}", tail(&standby.log()));
    }
}
