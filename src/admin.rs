//! What is served on `admin.listen`: `/livez`, `/readyz`, `/metrics`, `/status`, and a page on `/` that shows the
//! latter.

mod page;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::telemetry::health::Readiness;
use crate::telemetry::metrics::CONTENT_TYPE;
use crate::telemetry::status::Board;

/// A loop that has not ticked for so long is taken for dead: it ticks on while it waits for a server.
const DEAD_AFTER: Duration = Duration::from_secs(30);

/// How long open requests may take to end.
const LAST_REQUESTS: Duration = Duration::from_secs(1);

/// The address cannot be served.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot listen on {listen}, the address of admin.listen: {error}; free it, choose another, or set admin.listen = \
     \"off\""
)]
pub struct AdminError {
    listen: SocketAddr,
    error: io::Error,
}

/// The server, bound to its port.
pub struct Admin {
    listener: TcpListener,
    board: Board,
}

impl Admin {
    /// Listens on the address; port 0 is any that is free.
    pub async fn bind(listen: SocketAddr, board: Board) -> Result<Self, AdminError> {
        let listener = TcpListener::bind(listen).await.map_err(|error| AdminError { listen, error })?;
        Ok(Self { listener, board })
    }

    /// The address in fact: with port 0 the system chose one.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until `stop` is cancelled; open requests get a moment to end.
    pub async fn serve(self, stop: CancellationToken) {
        let memory = self.board.clone();
        let routes = Router::new()
            .route("/", get(page))
            .route("/status", get(status))
            .route("/livez", get(livez))
            .route("/readyz", get(readyz))
            .route("/metrics", get(metrics))
            .with_state(self.board);
        let server = axum::serve(self.listener, routes).with_graceful_shutdown(stop.clone().cancelled_owned());
        tokio::select! {
            _ = server.into_future() => {}
            () = memory.remember() => {}
            () = async { stop.cancelled().await; tokio::time::sleep(LAST_REQUESTS).await } => {}
        }
    }
}

async fn livez(State(board): State<Board>) -> Response {
    let age = board.pulse.age();
    if age < DEAD_AFTER {
        return "alive\n".into_response();
    }
    let reason = format!("the loop has not ticked for {} s\n", age.as_secs());
    (StatusCode::SERVICE_UNAVAILABLE, reason).into_response()
}

async fn readyz(State(board): State<Board>) -> Response {
    match board.health.readiness() {
        Readiness::Ready => "ready\n".into_response(),
        Readiness::Standby => "standby\n".into_response(),
        Readiness::NotReady(reasons) => (StatusCode::SERVICE_UNAVAILABLE, reasons + "\n").into_response(),
    }
}

async fn metrics(State(board): State<Board>) -> Response {
    board.metrics.ready.set(i64::from(!matches!(board.health.readiness(), Readiness::NotReady(_))));
    match board.metrics.render() {
        Ok(page) => ([(header::CONTENT_TYPE, CONTENT_TYPE)], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn status(State(board): State<Board>) -> Response {
    match serde_json::to_string_pretty(&board.status()) {
        Ok(json) => {
            let headers = [(header::CONTENT_TYPE, "application/json"), (header::CACHE_CONTROL, "no-store")];
            (headers, json + "\n").into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

async fn page(State(board): State<Board>) -> Response {
    page::render(&board.status())
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;
    use crate::telemetry::health::{Condition, Health, Pulse, State as Doing};
    use crate::telemetry::metrics::Metrics;

    async fn get(address: SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn probes_and_metrics_are_served_until_the_end() {
        let (health, pulse, metrics) = (Health::default(), Pulse::default(), Metrics::new());
        let board = Board::of_defaults(health.clone(), pulse, metrics.clone());
        let admin = Admin::bind(([127, 0, 0, 1], 0).into(), board).await.unwrap();
        let (address, stop) = (admin.address().unwrap(), CancellationToken::new());
        let server = tokio::spawn(admin.serve(stop.clone()));

        assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200"));
        let starting = get(address, "/readyz").await;
        assert!(starting.starts_with("HTTP/1.1 503") && starting.ends_with("starting\n"), "{starting}");
        health.set(Doing::Standby);
        let standby = get(address, "/readyz").await;
        assert!(standby.starts_with("HTTP/1.1 200") && standby.ends_with("\r\n\r\nstandby\n"), "{standby}");
        health.set(Doing::Running);
        health.raise(Condition::Slot, "the slot is lost");
        health.raise(Condition::NatsDown, "NATS is away");
        assert!(get(address, "/readyz").await.ends_with("\r\n\r\nthe slot is lost\nNATS is away\n"));
        metrics.decoded.inc();
        let page = get(address, "/metrics").await;
        assert!(page.contains(&format!("content-type: {CONTENT_TYPE}\r\n")), "{page}");
        assert!(page.contains("\noutbox_relay_events_decoded_total 1\n"), "{page}");
        assert!(page.contains("\noutbox_relay_ready 0\n"), "{page}");
        let status = get(address, "/status").await;
        let status: serde_json::Value = serde_json::from_str(status.split_once("\r\n\r\n").unwrap().1).unwrap();
        assert_eq!(status["stages"][0]["total"], 1);
        assert_eq!(status["reasons"], serde_json::json!(["the slot is lost", "NATS is away"]));
        let page = get(address, "/").await;
        assert!(page.contains("content-security-policy: default-src 'none'; style-src 'nonce-"), "{page}");
        assert!(page.contains("<li>the slot is lost</li>"), "{page}");
        assert!(get(address, "/nothing").await.starts_with("HTTP/1.1 404"));
        health.clear(Condition::Slot);
        health.clear(Condition::NatsDown);
        assert!(get(address, "/metrics").await.contains("\noutbox_relay_ready 1\n"));

        // A request that never ends does not delay the end for long.
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET /livez HTTP/1.1\r\n").await.unwrap();
        assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200"));
        stop.cancel();
        tokio::time::timeout(Duration::from_secs(5), server).await.unwrap().unwrap();
        assert!(TcpStream::connect(address).await.is_err());
    }

    #[tokio::test]
    async fn a_loop_that_stands_still_is_dead_until_it_ticks() {
        let pulse = Pulse::of_age(DEAD_AFTER);
        let board = Board::of_defaults(Health::default(), pulse.clone(), Metrics::new());
        let admin = Admin::bind(([127, 0, 0, 1], 0).into(), board).await.unwrap();
        let (address, stop) = (admin.address().unwrap(), CancellationToken::new());
        let server = tokio::spawn(admin.serve(stop.clone()));
        let dead = get(address, "/livez").await;
        assert!(dead.starts_with("HTTP/1.1 503") && dead.ends_with("has not ticked for 30 s\n"), "{dead}");
        pulse.tick();
        assert!(get(address, "/livez").await.starts_with("HTTP/1.1 200"));
        stop.cancel();
        server.await.unwrap();
    }

    #[tokio::test]
    async fn a_port_in_use_is_an_error_that_names_the_key() {
        let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let listen = other.local_addr().unwrap();
        let board = Board::of_defaults(Health::default(), Pulse::default(), Metrics::new());
        let error = Admin::bind(listen, board).await.err().unwrap();
        let text = error.to_string();
        assert!(text.contains("admin.listen") && text.contains(&listen.to_string()), "{text}");
    }
}
