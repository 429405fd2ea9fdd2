//! The client against a server that says exactly what the test tells it to.

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixListener;

use super::*;

const SOON: Duration = Duration::from_secs(5);

/// What the client makes of these bytes; the server then closes.
async fn answered(bytes: Vec<u8>) -> Result<Bytes, ApiError> {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("api.sock")).unwrap();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut request = [0; 1024];
        let _ = stream.read(&mut request).await.unwrap();
        // The client may have gone by then: that is its right.
        let _ = stream.write_all(&bytes).await;
    });
    let mut client = ApiClient::connect(&Dial::directly(dir.path(), "api.sock")).await.unwrap();
    let answer = client.send(&Request::describe(), SOON).await;
    server.await.unwrap();
    answer
}

#[tokio::test]
async fn answers_as_firecracker_gives_them_are_read() {
    let version = "HTTP/1.1 200 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\nContent-Type: application/json\
         \r\nContent-Length: 32\r\n\r\n{\"firecracker_version\":\"1.16.1\"}";
    assert_eq!(&answered(version.into()).await.unwrap()[..], b"{\"firecracker_version\":\"1.16.1\"}");
    let empty = "HTTP/1.1 204 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n";
    assert_eq!(&answered(empty.into()).await.unwrap()[..], b"");
    let refused = "HTTP/1.1 400 \r\nContent-Length: 29\r\n\r\n{\"fault_message\":\"no, never\"}";
    let error = answered(refused.into()).await.unwrap_err();
    assert!(
        matches!(&error, ApiError::Refused { status: 400, fault, .. } if fault.starts_with("no, never")),
        "{error:?}"
    );
}

#[tokio::test]
async fn an_answer_that_is_cut_off_too_long_or_no_http_is_an_error_and_not_waited_for() {
    let long = MAX_BODY_BYTES + 1;
    for bytes in [
        String::new(),
        "HTTP/1.1 2".to_owned(),
        "HTTP/1.1 200 \r\nContent-Length: 5\r\n\r\nab".to_owned(),
        "HTTP/1.1 abc\r\n\r\n".to_owned(),
        "HTTP/1.1 200 \r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab".to_owned(),
        "HTTP/1.1 200 \r\nContent-Length: 999999999\r\n\r\n".to_owned(),
        format!("HTTP/1.1 200 \r\nContent-Length: {long}\r\n\r\n{}", "x".repeat(long)),
        format!("HTTP/1.1 200 \r\nConnection: close\r\n\r\n{}", "x".repeat(long)),
        format!("HTTP/1.1 200 \r\nX: {}", "x".repeat(2 * MAX_HEAD_BYTES)),
    ] {
        let error = answered(bytes.clone().into()).await.unwrap_err();
        assert!(matches!(error, ApiError::Broken { .. }), "{bytes:.60}: {error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_says_nothing_is_given_up_on() {
    let dir = tempfile::tempdir().unwrap();
    let _listener = UnixListener::bind(dir.path().join("api.sock")).unwrap();
    let mut client = ApiClient::connect(&Dial::directly(dir.path(), "api.sock")).await.unwrap();
    let error = client.send(&Request::describe(), SOON).await.unwrap_err();
    assert!(matches!(error, ApiError::TimedOut { .. }), "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_socket_that_is_not_there_or_not_listened_on_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let error = ApiClient::connect_when_up(&Dial::directly(dir.path(), "api.sock"), SOON).await.unwrap_err();
    assert!(matches!(error, ApiError::NoSocket(_)), "{error:?}");
    // Bound and closed again: the file stays, and a connection is refused.
    let path = dir.path().join("api.sock");
    drop(UnixListener::bind(&path).unwrap());
    let waiting = tokio::spawn(async move {
        ApiClient::connect_when_up(&Dial::directly(dir.path(), "api.sock"), SOON).await.map(|_| dir)
    });
    tokio::time::sleep(FIRST_RETRY).await;
    std::fs::remove_file(&path).unwrap();
    let _listener = UnixListener::bind(&path).unwrap();
    waiting.await.unwrap().unwrap();
}

#[test]
fn only_a_failed_load_ends_the_process() {
    let refused = |call: &str, fault: &str| ApiError::Refused {
        call: call.to_owned(),
        status: 400,
        fault: fault.to_owned(),
    };
    let load = "PUT /snapshot/load";
    assert!(refused(load, "Load snapshot error: Address already in use (os error 98)").ends_the_process());
    assert!(!refused(load, &format!("Loading a microVM snapshot {LOAD_TOO_LATE}.")).ends_the_process());
    assert!(!refused("PUT /drives/rootfs", "No such file").ends_the_process());
    assert!(!refused("PUT /snapshot/create", "save/restore unavailable while running").ends_the_process());
}
