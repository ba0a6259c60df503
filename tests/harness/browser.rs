//! A headless browser, driven by its own driver over HTTP (WebDriver).

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};

use super::process::{Process, command, new_folder};
use super::wait::eventually_some;

/// The longest that one command of the driver may take, on two busy cores.
const COMMAND: Duration = Duration::from_mins(1);

/// A browser with one page open. Dropping it ends the browser and its driver.
#[derive(Debug)]
pub struct Browser {
    port: u16,
    session: String,
    _driver: Process,
}

/// The driver and the browser: what `CHROMEDRIVER` and `CHROMIUM` name, or what the system has. They cannot be fetched
/// without root, so that they are missed only in CI.
fn programs() -> Option<(PathBuf, PathBuf)> {
    let found = |variable: &str, name: &str| {
        if let Some(program) = std::env::var_os(variable) {
            return Some(program.into());
        }
        let path = std::env::var_os("PATH").unwrap_or_default();
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
    };
    let programs = found("CHROMEDRIVER", "chromedriver").zip(found("CHROMIUM", "chromium"));
    let missing = "chromedriver or chromium is missing: install them (Debian: apt-get install chromium-driver) or name \
                   them in CHROMEDRIVER and CHROMIUM";
    assert!(programs.is_some() || std::env::var_os("CI").is_none(), "{missing}");
    if programs.is_none() {
        eprintln!("NOT TESTED: {missing}");
    }
    programs
}

impl Browser {
    /// Starts one; `None` where there is no browser.
    pub async fn start() -> Option<Self> {
        let (driver, browser) = programs()?;
        let folder = new_folder("browser", None);
        let log = folder.join("driver.log");
        let out = std::fs::File::create(&log).unwrap();
        let mut run = command(&driver, &folder, None);
        run.arg("--port=0").stdout(out).stderr(Stdio::null());
        // One that ended in order would leave the browser behind.
        let driver = Process::spawn(&mut run, Signal::KILL);
        let port = eventually_some(COMMAND, "the browser's driver listens", async || {
            let said = std::fs::read_to_string(&log).ok()?;
            let port: String = said.rsplit_once("on port ")?.1.chars().take_while(char::is_ascii_digit).collect();
            port.parse().ok().filter(|_| said.contains("successfully"))
        })
        .await;
        let arguments = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--no-first-run",
            &format!("--user-data-dir={}", folder.join("profile").display()),
        ];
        let wanted = json!({"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"binary": browser, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }}});
        let made = send(port, "POST", "/session", &wanted).unwrap_or_else(|error| panic!("no browser: {error}"));
        let session = made["sessionId"].as_str().expect("a session").to_owned();
        Some(Self { port, session, _driver: driver })
    }

    /// A command of the session.
    fn call(&self, command: &str, body: &Value) -> Value {
        send(self.port, "POST", &format!("/session/{}/{command}", self.session), body)
            .unwrap_or_else(|error| panic!("{command}: {error}"))
    }

    /// Opens a page, and returns once it is loaded.
    pub fn open(&self, url: &str) {
        self.call("url", &json!({ "url": url }));
    }

    /// The value of a piece of JavaScript, such as `return document.title`.
    pub fn script(&self, text: &str) -> Value {
        self.call("execute/sync", &json!({"script": text, "args": []}))
    }

    /// The same for one that ends by calling its last argument.
    pub fn script_later(&self, text: &str) -> Value {
        self.call("execute/async", &json!({"script": text, "args": []}))
    }

    /// The text of the first element that a selector finds, as a reader sees it.
    pub fn text(&self, selector: &str) -> String {
        let found = self.script(&format!("return document.querySelector({selector:?})?.innerText ?? null"));
        found.as_str().unwrap_or_else(|| panic!("nothing is at {selector}")).to_owned()
    }

    /// A command of the browser's own protocol.
    pub fn protocol(&self, name: &str, parameters: &Value) -> Value {
        self.call("goog/cdp/execute", &json!({"cmd": name, "params": parameters}))
    }

    /// What the console of the page said, since it was asked last.
    pub fn console(&self) -> Vec<String> {
        let log = self.call("se/log", &json!({"type": "browser"}));
        log.as_array().expect("entries").iter().map(ToString::to_string).collect()
    }

    /// The addresses that the page asked for, since that was asked last.
    pub fn requests(&self) -> Vec<String> {
        let log = self.call("se/log", &json!({"type": "performance"}));
        let url = |entry: &Value| {
            let event: Value = serde_json::from_str(entry["message"].as_str()?).ok()?;
            let event = &event["message"];
            let asked = event["method"] == "Network.requestWillBeSent";
            asked.then(|| event["params"]["request"]["url"].as_str().expect("an address").to_owned())
        };
        log.as_array().expect("entries").iter().filter_map(url).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // In order first: the browser's own helpers then end too.
        let _ = send(self.port, "DELETE", &format!("/session/{}", self.session), &json!({}));
    }
}

/// One request to the driver; its value.
fn send(port: u16, method: &str, path: &str, body: &Value) -> Result<Value, String> {
    let text = |error: std::io::Error| error.to_string();
    let mut stream = TcpStream::connect(("127.0.0.1", port)).map_err(text)?;
    stream.set_read_timeout(Some(COMMAND)).map_err(text)?;
    let body = body.to_string();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).map_err(text)?;
    let mut answer = Vec::new();
    let mut part = [0; 8192];
    // The driver does not close every connection: the length says where the answer ends.
    let (head, length) = loop {
        let count = stream.read(&mut part).map_err(text)?;
        answer.extend_from_slice(&part[..count]);
        if let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&answer[..end]).to_lowercase();
            let length =
                head.lines().find_map(|line| line.strip_prefix("content-length:")?.trim().parse::<usize>().ok());
            break (end + 4, length.ok_or("an answer without a length")?);
        }
        if count == 0 {
            return Err("the driver closed the connection".to_owned());
        }
    };
    while answer.len() < head + length {
        let count = stream.read(&mut part).map_err(text)?;
        if count == 0 {
            return Err("the driver closed the connection".to_owned());
        }
        answer.extend_from_slice(&part[..count]);
    }
    let answer: Value = serde_json::from_slice(&answer[head..head + length]).map_err(|error| error.to_string())?;
    match answer["value"]["error"].as_str() {
        Some(error) => Err(format!("{error}: {}", answer["value"]["message"])),
        None => Ok(answer["value"].clone()),
    }
}
