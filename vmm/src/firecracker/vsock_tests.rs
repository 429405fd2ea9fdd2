//! The handshake against a socket that answers what the test says.

use tokio::net::UnixListener;

use super::*;

const SOON: Duration = Duration::from_secs(5);
const NAME: &str = "v.sock";

/// Serves one connection: reads the request, then sends `answer`.
async fn serve_one(listener: &UnixListener, answer: &[u8]) -> UnixStream {
    let (mut stream, _) = listener.accept().await.unwrap();
    let mut request = [0; 13];
    stream.read_exact(&mut request).await.unwrap();
    assert_eq!(&request, b"CONNECT 5252\n");
    let _ = stream.write_all(answer).await;
    stream
}

#[tokio::test]
async fn what_follows_the_answer_belongs_to_the_guest() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join(NAME)).unwrap();
    let dial = Dial::directly(dir.path(), NAME);
    let (connected, _far) =
        tokio::join!(connect(&dial, 5252, SOON), serve_one(&listener, b"OK 1073741824\nhello"));
    let mut bytes = [0; 5];
    connected.unwrap().read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"hello");
}

#[tokio::test]
async fn any_other_answer_is_nonsense() {
    for answer in
        ["ok 1\n", "OK \n", "OK -1\n", "OK +1\n", "OK 4294967296\n", "OK 1 2\n", "NO\n", "OK 11111111111111"]
    {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join(NAME)).unwrap();
        let dial = Dial::directly(dir.path(), NAME);
        let (connected, _far) =
            tokio::join!(connect(&dial, 5252, SOON), serve_one(&listener, answer.as_bytes()));
        assert!(matches!(connected, Err(VsockError::Nonsense(_))), "{answer}: {connected:?}");
    }
}

#[tokio::test]
async fn reader_and_writer_both_wait_for_a_guest_that_is_not_up_yet() {
    let dir = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join(NAME)).unwrap();
    let guest = GuestConnection::new(Dial::directly(dir.path(), NAME), 5252);
    let (mut reader, mut writer) = tokio::io::split(guest);
    let reading = tokio::spawn(async move {
        let mut bytes = [0; 4];
        reader.read_exact(&mut bytes).await.map(|_| bytes)
    });
    let writing = tokio::spawn(async move { writer.write_all(b"ping").await.map(|()| writer) });
    // The guest does not listen at first: the connection is closed.
    drop(serve_one(&listener, b"").await);
    drop(serve_one(&listener, b"").await);
    let mut far = serve_one(&listener, b"OK 1\n").await;
    let mut bytes = [0; 4];
    far.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"ping");
    far.write_all(b"pong").await.unwrap();
    assert_eq!(&reading.await.unwrap().unwrap(), b"pong");
    writing.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_vmm_that_is_gone_ends_the_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let mut guest = GuestConnection::new(Dial::directly(dir.path(), NAME), 5252);
    let error = guest.write_all(b"ping").await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    drop(UnixListener::bind(dir.path().join(NAME)).unwrap());
    let mut guest = GuestConnection::new(Dial::directly(dir.path(), NAME), 5252);
    let error = guest.read_u8().await.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
}
