//! A stand-in spoken to byte by byte, without the driver's client.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use mvm_tests::{PATIENCE, wait_for};

use crate::firecracker::site::STAND_IN;

/// Long enough for an answer, short enough to wait for none.
const SILENCE: Duration = Duration::from_millis(700);

pub(crate) struct Raw {
    child: Child,
    dir: PathBuf,
}

impl Raw {
    /// A process in `dir`, which has a `kernel` and a `rootfs`.
    pub(crate) fn start(dir: &Path, environment: &[(&str, &str)]) -> Self {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("kernel"), b"\x7fELF").unwrap();
        std::fs::write(dir.join("rootfs"), b"root").unwrap();
        let _ = std::fs::remove_file(dir.join("api.sock"));
        let console = File::options().create(true).append(true).open(dir.join("console.log")).unwrap();
        let child = Command::new(STAND_IN)
            .args(["--id", "i-00000001", "--api-sock", "api.sock"])
            .envs(environment.iter().copied())
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(console)
            .spawn()
            .unwrap();
        let raw = Self { child, dir: dir.to_owned() };
        wait_for("the API socket", PATIENCE, || UnixStream::connect(raw.dir.join("api.sock")).ok());
        raw
    }

    /// The status and body of one request.
    pub(crate) fn call(&self, line: &str, body: &str) -> (u16, String) {
        let mut stream = UnixStream::connect(self.dir.join("api.sock")).unwrap();
        let length = body.len();
        write!(stream, "{line} HTTP/1.1\r\nContent-Length: {length}\r\n\r\n{body}").unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").expect("an answer has a head");
        (head[9..12].parse().unwrap(), body.to_owned())
    }

    pub(crate) fn done(&self, line: &str, body: &str) {
        let answer = self.call(line, body);
        assert_eq!(answer, (204, String::new()), "{line} {body}");
    }

    /// The words of a refusal with 400.
    pub(crate) fn refused(&self, line: &str, body: &str) -> String {
        let (status, said) = self.call(line, body);
        assert_eq!(status, 400, "{line} {body}: {said}");
        let value: serde_json::Value = serde_json::from_str(&said).unwrap();
        value["fault_message"].as_str().expect("a refusal says why").to_owned()
    }

    pub(crate) fn state(&self) -> String {
        let (status, body) = self.call("GET /", "");
        assert_eq!(status, 200);
        let value: serde_json::Value = serde_json::from_str(&body).unwrap();
        value["state"].as_str().unwrap().to_owned()
    }

    /// Everything a small machine needs, and its start.
    pub(crate) fn boot(&self) {
        self.configure();
        self.done("PUT /actions", r#"{"action_type":"InstanceStart"}"#);
    }

    pub(crate) fn configure(&self) {
        self.done("PUT /machine-config", r#"{"vcpu_count":1,"mem_size_mib":1}"#);
        self.done("PUT /boot-source", r#"{"kernel_image_path":"kernel","boot_args":"quiet"}"#);
        let drive =
            r#"{"drive_id":"rootfs","path_on_host":"rootfs","is_root_device":true,"is_read_only":true}"#;
        self.done("PUT /drives/rootfs", drive);
        self.done("PUT /network-interfaces/eth0", r#"{"iface_id":"eth0","host_dev_name":"tap0"}"#);
        self.done("PUT /vsock", r#"{"guest_cid":3,"uds_path":"v.sock"}"#);
    }

    /// A snapshot of a machine that was booted; it stays paused.
    pub(crate) fn snapshot(&self, kind: &str) {
        let body = format!(r#"{{"snapshot_type":"{kind}","snapshot_path":"state","mem_file_path":"mem"}}"#);
        self.done("PUT /snapshot/create", &body);
    }

    pub(crate) fn vm(&self, state: &str) {
        self.done("PATCH /vm", &format!(r#"{{"state":"{state}"}}"#));
    }

    /// What a vsock connection is told: a line, the end, or nothing for as long as anyone waits.
    pub(crate) fn vsock(&self, port: u32) -> Vsock {
        let mut stream = UnixStream::connect(self.dir.join("v.sock")).unwrap();
        stream.set_read_timeout(Some(SILENCE)).unwrap();
        writeln!(stream, "CONNECT {port}").unwrap();
        let mut answer = [0; 3];
        match stream.read_exact(&mut answer) {
            Ok(()) => {
                assert_eq!(&answer, b"OK ");
                Vsock::Open(stream)
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Vsock::Silent,
            Err(_) => Vsock::Closed,
        }
    }

    /// Waits until the guest's program listens.
    pub(crate) fn guest_up(&self) {
        wait_for("the guest", PATIENCE, || matches!(self.vsock(5252), Vsock::Open(_)).then_some(()));
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait_for("the process to end", PATIENCE, || child.try_wait().unwrap())
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }
}

pub(crate) enum Vsock {
    Open(UnixStream),
    Closed,
    Silent,
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
