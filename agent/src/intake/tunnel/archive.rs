//! `export`, `import` and `release`: archives of sleeping instances, as pieces on a stream.
//!
//! By hand, for an operator whom the coordinator let in, or for a move: then the stream shows a ticket that was given on the
//! session. Neither side keeps more than a few pieces: a reader that is slow stops the reading of files at the other end.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes};
use mvm_proto::wire::tunnel::v1::{Done, Export, Frame, Import as AskedImport, Open, Piece, Release, frame};
use mvm_proto::{Digest, InstanceId, Problem};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::mpsc;

use super::Shared;
use super::stream::{Answers, Frames, Opening, bad, finish, framed, id, lost};
use crate::instance::record::Record;
use crate::node::actions::override_for;
use crate::node::migration::{Asked, Import};
use crate::node::transfer::Granted;

/// Of an archive in one frame: a quarter of what a frame may have.
const PIECE_BYTES: usize = 32 * 1024;
/// Pieces that wait until they are written.
const WAITING_PIECES: usize = 4;
/// Streams of archives count against those of one caller: this one, for moves.
const MOVES: &str = "moves";

pub(super) async fn export(
    opening: &Opening,
    asked: &Export,
    _frames_in: Frames,
    frames_out: &mut Answers,
) -> Result<(), Problem> {
    let node = &opening.shared.parts.node;
    let place = opening.place.clone();
    let asked = match asked.ticket.is_empty() {
        true => Asked { place, by: opening.actor.clone(), transfer: None },
        false => match node.take_ticket(&place.instance, &asked.ticket)? {
            Granted::Export(asked) => asked,
            Granted::Import(_) => return Err(bad("the ticket is one of an import".to_owned())),
        },
    };
    let caller = if asked.transfer.is_some() { MOVES } else { &opening.actor };
    let _slot = opening.shared.limits.take(&opening.place.tenant, caller)?;
    let mut archive = node.export_instance(asked).await?;
    if let Err(error) = frames_out.send(&opening.opened(String::new(), false)).await {
        lost(&error);
        return Ok(());
    }
    while let Some(piece) = archive.recv().await {
        let mut piece = piece.map_err(|error| broken(&error))?;
        while !piece.is_empty() {
            let data = piece.split_to(piece.len().min(PIECE_BYTES));
            if let Err(error) =
                frames_out.send(&framed(frame::Body::Piece(Piece { data, last: false }))).await
            {
                lost(&error);
                return Ok(());
            }
        }
    }
    let last = Piece { data: Bytes::new(), last: true };
    match frames_out.send(&framed(frame::Body::Piece(last))).await {
        Ok(()) => finish(frames_out).await,
        Err(error) => lost(&error),
    }
    Ok(())
}

pub(super) async fn import(
    shared: &Shared,
    open: &Open,
    actor: String,
    asked: &AskedImport,
    frames_in: Frames,
    frames_out: &mut Answers,
) -> Result<(), Problem> {
    let node = &shared.parts.node;
    let import = if asked.ticket.is_empty() {
        let override_for = override_for(Some(asked.override_seconds))?;
        Import { by: actor, override_for, expected: None }
    } else {
        let instance: InstanceId = id("instance_id", &open.instance_id)?;
        match node.take_ticket(&instance, &asked.ticket)? {
            Granted::Import(expected) => {
                Import { by: actor, override_for: std::time::Duration::ZERO, expected: Some(expected) }
            }
            Granted::Export(_) => return Err(bad("the ticket is one of an export".to_owned())),
        }
    };
    let (pieces, waiting) = mpsc::channel(WAITING_PIECES);
    let reading = tokio::spawn(read(frames_in, pieces));
    let archive = PieceReader { pieces: waiting, left: Bytes::new() };
    let imported = node.import_instance(import, Box::new(archive)).await;
    reading.abort();
    done(&imported?, frames_out).await;
    Ok(())
}

pub(super) async fn release(
    opening: &Opening,
    asked: &Release,
    frames_out: &mut Answers,
) -> Result<(), Problem> {
    let snapshot: Digest = asked.snapshot.parse().map_err(|_| bad("snapshot is not a digest".to_owned()))?;
    let node = &opening.shared.parts.node;
    let asked = Asked { place: opening.place.clone(), by: opening.actor.clone(), transfer: None };
    node.release_instance(asked, snapshot).await?;
    let place = &opening.place;
    let told = Done {
        tenant_id: place.tenant.to_string(),
        pool_id: place.pool.to_string(),
        instance_id: place.instance.to_string(),
    };
    tell(told, frames_out).await;
    Ok(())
}

async fn done(record: &Record, frames_out: &mut Answers) {
    let told = Done {
        tenant_id: record.tenant.to_string(),
        pool_id: record.pool.to_string(),
        instance_id: record.id.to_string(),
    };
    tell(told, frames_out).await;
}

async fn tell(told: Done, frames_out: &mut Answers) {
    match frames_out.send(&framed(frame::Body::Done(told))).await {
        Ok(()) => finish(frames_out).await,
        Err(error) => lost(&error),
    }
}

/// Hands on what comes until the archive is whole or the stream breaks off.
async fn read(mut frames_in: Frames, pieces: mpsc::Sender<io::Result<Bytes>>) {
    loop {
        let piece = match frames_in.recv().await {
            Ok(Some(Frame { body: Some(frame::Body::Piece(piece)) })) => piece,
            Ok(_) => {
                let _ = pieces.send(Err(io::Error::other("the stream ended before the archive"))).await;
                return;
            }
            Err(error) => {
                let _ = pieces.send(Err(io::Error::other(error))).await;
                return;
            }
        };
        if !piece.data.is_empty() && pieces.send(Ok(piece.data)).await.is_err() {
            return;
        }
        if piece.last {
            return;
        }
    }
}

fn broken(error: &io::Error) -> Problem {
    let detail = format!("the archive broke off: {error}");
    Problem::new(503, "move_failed", detail, "Look at the agent's log, then try again.")
}

/// An archive, read as its pieces come.
struct PieceReader {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    left: Bytes,
}

impl AsyncRead for PieceReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.left.is_empty() {
            match ready!(self.pieces.poll_recv(context)) {
                Some(Ok(piece)) => self.left = piece,
                Some(Err(error)) => return Poll::Ready(Err(error)),
                None => return Poll::Ready(Ok(())),
            }
        }
        let taken = self.left.len().min(buffer.remaining());
        buffer.put_slice(&self.left[..taken]);
        self.left.advance(taken);
        Poll::Ready(Ok(()))
    }
}
