//! Guests that a test plays: what each answers to a request is the test's to say.

use std::sync::Arc;

use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt as _};
use mvm_proto::InstanceId;
use mvm_proto::guest::{
    Deframer, Found, GuestFrame, GuestHello, HostFrame, OPENING, Readiness, guest_frame, host_frame,
    put_frame,
};
use mvm_vmm::{DriverError, GuestStream};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::watch;

use super::{Dial, GuestLinks, Inner};
use crate::clock::Clock;

/// What a guest says to one request, piece by piece, each when it says it.
pub(crate) type Answers = BoxStream<'static, guest_frame::Body>;

struct FakeGuest<F> {
    script: Arc<F>,
}

/// Links to guests that answer as `script` says. One request is answered after the other.
pub(crate) fn links_to<F>(script: F) -> GuestLinks
where
    F: Fn(&InstanceId, host_frame::Body) -> Answers + Send + Sync + 'static,
{
    let clock = Clock::starting_at(mvm_proto::Timestamp::from_unix_ms(1_800_000_000_000));
    let inner = Inner {
        dialer: Arc::new(FakeGuest { script: Arc::new(script) }),
        clock,
        links: parking_lot::Mutex::default(),
        changed: Arc::new(watch::Sender::new(0)),
    };
    GuestLinks { inner: Arc::new(inner) }
}

impl<F> Dial for FakeGuest<F>
where
    F: Fn(&InstanceId, host_frame::Body) -> Answers + Send + Sync + 'static,
{
    fn dial<'a>(&'a self, instance: &'a InstanceId) -> BoxFuture<'a, Result<GuestStream, DriverError>> {
        Box::pin(async move {
            let (ours, theirs) = tokio::io::duplex(1 << 20);
            let (script, instance) = (Arc::clone(&self.script), instance.clone());
            tokio::spawn(async move {
                let _ = serve(theirs, |body| script(&instance, body)).await;
            });
            Ok(Box::new(ours) as GuestStream)
        })
    }
}

async fn serve(
    mut stream: DuplexStream,
    script: impl Fn(host_frame::Body) -> Answers,
) -> std::io::Result<()> {
    let mut deframer = Deframer::default();
    let mut buffer = [0; 4096];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return Ok(());
        }
        deframer.push(&buffer[..count]);
        while let Some(found) = deframer.next::<HostFrame>() {
            let Found::Message(HostFrame { nonce, request, body: Some(body) }) = found else { continue };
            let mut answers = match body {
                host_frame::Body::Hello(_) => {
                    stream.write_all(OPENING).await?;
                    let readiness = Readiness::Ready.into();
                    let hello = GuestHello { version: 3, readiness, ..GuestHello::default() };
                    futures::stream::iter([guest_frame::Body::Hello(hello)]).boxed()
                }
                host_frame::Body::Forget(_) => continue,
                body => script(body),
            };
            while let Some(answer) = answers.next().await {
                let mut bytes = Vec::new();
                let frame = GuestFrame { nonce, request, body: Some(answer) };
                put_frame(&mut bytes, &frame).map_err(std::io::Error::other)?;
                stream.write_all(&bytes).await?;
            }
        }
    }
}
