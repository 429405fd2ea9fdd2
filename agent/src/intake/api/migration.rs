//! Instances on their way between nodes: archives streamed out and in, never held whole.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, BodyDataStream};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, RawQuery, State};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use bytes::{Buf as _, Bytes};
use futures::{StreamExt as _, stream};
use http::{HeaderMap, StatusCode, header};
use mvm_proto::Digest;
use serde::Deserialize;
use tokio::io::{AsyncRead, ReadBuf};

use super::Api;
use super::input::{InstancePath, instance_and_body, media_type, no_query};
use super::problem::{self, Refused};
use crate::intake::authz::Caller;
use crate::node::Place;
use crate::node::actions::override_for;
use crate::node::migration::{Asked, Import};

const OCTETS: &str = "application/octet-stream";

fn asked(path: InstancePath, caller: &Caller) -> Asked {
    let place = Place { tenant: path.tenant, pool: path.pool, instance: path.instance };
    Asked { place, by: caller.describe(), transfer: None }
}

pub(super) async fn export(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<(String, String, String)>, PathRejection>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refused> {
    no_query(query.as_deref())?;
    let path = InstancePath::read(path)?;
    let pieces = api.shared.node.export_instance(asked(path, &caller)).await?;
    let pieces = stream::unfold(pieces, |mut pieces| async move { Some((pieces.recv().await?, pieces)) });
    Ok(([(header::CONTENT_TYPE, OCTETS)], Body::from_stream(pieces)).into_response())
}

/// What was exported.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct ReleaseBody {
    /// The digest of the snapshot that the archive holds.
    snapshot: Option<Digest>,
}

pub(super) async fn release(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    path: Result<Path<(String, String, String)>, PathRejection>,
    RawQuery(query): RawQuery,
    body: Body,
) -> Result<Response, Refused> {
    let (path, body) = instance_and_body::<ReleaseBody>(path, query.as_deref(), body).await?;
    let Some(snapshot) = body.snapshot else {
        return Err(problem::bad_body("`snapshot` must be the digest of the exported snapshot"));
    };
    api.shared.node.release_instance(asked(path, &caller), snapshot).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ImportQuery {
    override_seconds: Option<u64>,
}

pub(super) async fn import(
    State(api): State<Api>,
    Extension(caller): Extension<Caller>,
    query: Result<Query<ImportQuery>, QueryRejection>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Refused> {
    let Query(query) = query.map_err(|cause| problem::bad_query(cause.body_text()))?;
    media_type(&headers, &[OCTETS])?;
    let override_for = override_for(query.override_seconds)?;
    let import = Import { by: caller.describe(), override_for, expected: None };
    let archive = BodyReader { pieces: Some(body.into_data_stream()), left: Bytes::new() };
    let record = api.shared.node.import_instance(import, Box::new(archive)).await?;
    Ok((StatusCode::CREATED, Json(api.shared.node.status_of(&record))).into_response())
}

/// How long the rest of a refused archive is waited for.
const REST_WITHIN: Duration = Duration::from_secs(30);

/// A request's body, read as it comes.
struct BodyReader {
    /// Absent: it is at its end.
    pieces: Option<BodyDataStream>,
    left: Bytes,
}

impl Drop for BodyReader {
    /// A connection that is closed with something unread takes the answer with it: a client that is still sending would never
    /// learn why it was refused.
    fn drop(&mut self) {
        let Some(mut rest) = self.pieces.take() else { return };
        tokio::spawn(async move {
            while let Ok(Some(Ok(_))) = tokio::time::timeout(REST_WITHIN, rest.next()).await {}
        });
    }
}

impl AsyncRead for BodyReader {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.left.is_empty() {
            let Some(pieces) = &mut self.pieces else { return Poll::Ready(Ok(())) };
            match ready!(pieces.poll_next_unpin(context)) {
                Some(Ok(piece)) => self.left = piece,
                Some(Err(error)) => {
                    self.pieces = None;
                    return Poll::Ready(Err(io::Error::other(error)));
                }
                None => self.pieces = None,
            }
        }
        let taken = self.left.len().min(buffer.remaining());
        buffer.put_slice(&self.left[..taken]);
        self.left.advance(taken);
        Poll::Ready(Ok(()))
    }
}
