//! What people and programs ask over TCP: the `Control` service for operators, declared objects over gRPC and REST, with
//! health and reflection beside them.
//!
//! Who makes a request is found out once, for all services, before any of them sees it (`identify`). Errors carry a
//! problem (see `refuse`).

mod events;
mod guest_sessions;
mod guests;
pub(crate) mod identify;
mod instance_list;
mod instances;
mod nodes;
pub(crate) mod object_events;
mod objects;
mod push;
mod trust;

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use mvm_pki::Identity;
use mvm_pki::tls::PeerCertificate;
use mvm_proto::wire::control::v1::control_server::{Control, ControlServer};
use mvm_proto::wire::control::v1::{
    ActOnInstanceRequest, ActOnInstanceResponse, CoordinatorInfo, CreateTokenRequest, CreateTokenResponse,
    DeleteGuestSessionsRequest, DeleteGuestSessionsResponse, GetDocumentRequest, GetInfoRequest,
    GetLogsRequest, GetLogsResponse, GetNodeRequest, GetTrustRequest, ListGuestSessionsRequest,
    ListGuestSessionsResponse, ListInstancesRequest, ListInstancesResponse, ListNodesRequest,
    ListNodesResponse, ListOperatorsRequest, ListOperatorsResponse, ListTokensRequest, ListTokensResponse,
    Node, NodeEvent, PushProgress, PushRequest, RemoveNodeRequest, RemoveNodeResponse, RemoveOperatorRequest,
    RemoveOperatorResponse, RenewCertificateRequest, RenewCertificateResponse, RevokeTokenRequest,
    RevokeTokenResponse, StoredDocument, StreamEventsRequest, TrustState, UpdateTrustRequest,
};
use mvm_proto::wire::frames::MAX_TUNNEL_FRAME_BYTES;
use mvm_proto::wire::objects::v1::objects_server::ObjectsServer;
use mvm_proto::wire::tunnel::v1::guests_server::GuestsServer;
use mvm_proto::wire::{FILE_DESCRIPTORS, MAX_MESSAGE_BYTES};
use mvm_proto::{NodeId, Problem, TraceContext};
use mvm_telemetry::TraceRequests;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::Routes;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::server::Connected as _;
use tonic::{Request, Response, Status};

use self::identify::Identified;
use crate::enrolment::NotRenewed;
use crate::error::BoxError;
use crate::grpc_listener::calls::CountCalls;
use crate::grpc_listener::{GrpcPeer, GrpcStream};
use crate::objects::Caller;
use crate::records::IssuedRecord;
use crate::state::State;
use crate::stored::now;
use crate::tokens::PinnedRoots;
use crate::{enrolment, operators, refuse, rest, tokens};

/// Calls at once on one connection.
const MAX_STREAMS: u32 = 64;
/// A connection whose other end is gone is noticed after this.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
const KEEP_ALIVE_WAIT: Duration = Duration::from_secs(10);
/// Header bytes of one request.
const MAX_HEADER_BYTES: u32 = 16 * 1024;

/// Serves gRPC on verified connections until `shutdown`, then lets calls in flight finish.
pub(crate) async fn serve(
    state: Arc<State>,
    connections: mpsc::Receiver<std::io::Result<GrpcStream>>,
) -> Result<(), BoxError> {
    let control = ControlServer::new(Service(Arc::clone(&state)))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let (health, health_service) = tonic_health::server::health_reporter();
    health.set_serving::<ControlServer<Service>>().await;
    let reflection = tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(FILE_DESCRIPTORS)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        .build_v1()?;
    let noting = Arc::clone(&state);
    let connections = ReceiverStream::new(connections).then(move |connection| {
        let state = Arc::clone(&noting);
        async move {
            if let Ok(stream) = &connection {
                note_operator(&state, &stream.connect_info()).await;
            }
            connection
        }
    });
    let objects = ObjectsServer::new(objects::ObjectService(Arc::clone(&state)))
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let guests = GuestsServer::new(guests::GuestService::new(Arc::clone(&state)))
        .max_decoding_message_size(MAX_TUNNEL_FRAME_BYTES)
        .max_encoding_message_size(MAX_TUNNEL_FRAME_BYTES);
    let services = Routes::from(rest::router(Arc::clone(&state)))
        .add_service(InterceptedService::new(control, operators_only))
        .add_service(InterceptedService::new(health_service, known_callers_only))
        .add_service(InterceptedService::new(reflection, known_callers_only))
        .add_service(objects)
        .add_service(guests);
    let (identifying, tracer) = (Arc::clone(&state), state.tracer.clone());
    let serving = tonic::transport::Server::builder()
        .accept_http1(true)
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_WAIT))
        .max_concurrent_streams(MAX_STREAMS)
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .layer(tower::layer::layer_fn(move |inner| TraceRequests::new(inner, tracer.clone(), log_span)))
        .layer(tower::layer::layer_fn(move |inner| identify::Identify::new(inner, Arc::clone(&identifying))))
        .layer(tower::layer::layer_fn(CountCalls::new))
        .add_routes(services)
        .serve_with_incoming_shutdown(connections, async move {
            state.shutdown.cancelled().await;
            health.set_not_serving::<ControlServer<Service>>().await;
        });
    Box::pin(serving).await?;
    Ok(())
}

/// What the log's lines of a request begin with.
fn log_span(context: &TraceContext) -> tracing::Span {
    tracing::info_span!("request", trace = %context.trace_id())
}

/// Brings an operator's record up to date before its first request.
async fn note_operator(state: &State, peer: &GrpcPeer) {
    let Some((identity, certificate)) = &peer.proven else { return };
    let PeerCertificate { fingerprint, serial_hex, not_before, not_after } = certificate.clone();
    let presented =
        IssuedRecord { serial: serial_hex, fingerprint, issued_at: not_before, not_after, root: None };
    if let Err(problem) = operators::note_use(state, identity, &presented, now()).await {
        // Whether it may go on does not depend on this.
        tracing::warn!(%problem, "could not record an operator's certificate");
    }
}

/// Lets requests through that come with an operator's certificate: an API key gives access to objects alone.
fn operators_only(request: Request<()>) -> Result<Request<()>, Status> {
    let is_operator = request.extensions().get::<GrpcPeer>().is_some_and(|peer| peer.proven.is_some());
    let request = known_callers_only(request)?;
    if is_operator { Ok(request) } else { Err(refuse::status(&refuse::no_certificate())) }
}

fn known_callers_only(request: Request<()>) -> Result<Request<()>, Status> {
    match request.extensions().get::<Identified>() {
        Some(Identified(Ok(_))) => Ok(request),
        Some(Identified(Err(problem))) => Err(refuse::status(problem)),
        None => Err(refuse::status(&refuse::no_credential())),
    }
}

fn caller<T>(request: &Request<T>) -> Result<Identity, Status> {
    let proven = request.extensions().get::<GrpcPeer>().and_then(|peer| peer.proven.as_ref());
    proven.map(|(identity, _)| identity.clone()).ok_or_else(|| refuse::status(&refuse::no_certificate()))
}

/// The caller, as the audit log names it.
fn who<T>(request: &Request<T>) -> Result<Caller, Status> {
    let identified = request.extensions().get::<Identified>();
    let caller = identified.map_or_else(|| Err(refuse::no_credential()), |identified| identified.0.clone());
    caller.map_err(|problem| refuse::status(&problem))
}

struct Service(Arc<State>);

type Answer<T> = Result<Response<T>, Status>;

fn answer<T>(result: Result<T, Problem>) -> Answer<T> {
    result.map(Response::new).map_err(|problem| refuse::status(&problem))
}

fn parse<T: std::str::FromStr>(what: &str, text: &str) -> Result<T, Problem>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|error| refuse::bad_request(format!("{what} {error}")))
}

#[tonic::async_trait]
impl Control for Service {
    async fn get_info(&self, _: Request<GetInfoRequest>) -> Answer<CoordinatorInfo> {
        let state = &self.0;
        let nodes = nodes::count(state).await.map_err(|problem| refuse::status(&problem))?;
        Ok(Response::new(CoordinatorInfo {
            cluster: state.cluster.cluster.to_string(),
            name: state.cluster.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_at: state.started_at.to_string(),
            epoch: state.epoch,
            dev_cluster: state.trust.current().is_dev(),
            nodes,
            connected: u32::try_from(state.fleet.connected()).unwrap_or(u32::MAX),
        }))
    }

    async fn create_token(&self, request: Request<CreateTokenRequest>) -> Answer<CreateTokenResponse> {
        let by = caller(&request)?;
        answer(self.new_token(request.get_ref(), &by).await)
    }

    async fn list_tokens(&self, _: Request<ListTokensRequest>) -> Answer<ListTokensResponse> {
        let now = now();
        let records = tokens::list(&self.0.store).await;
        answer(records.map(|records| ListTokensResponse {
            tokens: records.iter().map(|record| tokens::message(record, now)).collect(),
        }))
    }

    async fn revoke_token(&self, request: Request<RevokeTokenRequest>) -> Answer<RevokeTokenResponse> {
        let now = now();
        let revoked = tokens::revoke(&self.0.store, &request.get_ref().token_id, now).await;
        answer(revoked.map(|record| RevokeTokenResponse { record: Some(tokens::message(&record, now)) }))
    }

    async fn list_nodes(&self, request: Request<ListNodesRequest>) -> Answer<ListNodesResponse> {
        answer(nodes::list(&self.0, request.get_ref()).await)
    }

    async fn get_node(&self, request: Request<GetNodeRequest>) -> Answer<Node> {
        answer(nodes::get(&self.0, &request.get_ref().node_id).await)
    }

    async fn remove_node(&self, request: Request<RemoveNodeRequest>) -> Answer<RemoveNodeResponse> {
        let node: NodeId =
            parse("node_id", &request.get_ref().node_id).map_err(|problem| refuse::status(&problem))?;
        let removed = enrolment::remove(&self.0, &node, &who(&request)?, now()).await;
        answer(removed.map(|session_closed| RemoveNodeResponse { session_closed }))
    }

    type PushStream = ReceiverStream<Result<PushProgress, Status>>;

    async fn push(&self, request: Request<PushRequest>) -> Answer<Self::PushStream> {
        let by = who(&request)?;
        answer(push::push(&self.0, request.into_inner(), by).await.map(ReceiverStream::new))
    }

    async fn get_document(&self, request: Request<GetDocumentRequest>) -> Answer<StoredDocument> {
        answer(self.document(request.get_ref()).await)
    }

    async fn list_instances(&self, request: Request<ListInstancesRequest>) -> Answer<ListInstancesResponse> {
        answer(instance_list::one_answer(&self.0, request.get_ref()).await)
    }

    type StreamInstancesStream = BoxStream<'static, Result<ListInstancesResponse, Status>>;

    async fn stream_instances(
        &self,
        request: Request<ListInstancesRequest>,
    ) -> Answer<Self::StreamInstancesStream> {
        let pages = instance_list::pages(&self.0, request.get_ref()).await;
        let told = |page: instance_list::Piece| page.map_err(|problem| refuse::status(&problem));
        answer(pages.map(|pages| ReceiverStream::new(pages).map(told).boxed()))
    }

    type StreamEventsStream = BoxStream<'static, Result<NodeEvent, Status>>;

    async fn stream_events(&self, request: Request<StreamEventsRequest>) -> Answer<Self::StreamEventsStream> {
        let events = events::stream(&self.0, request.get_ref()).await;
        answer(events.map(|events| ReceiverStream::new(events).map(Ok).boxed()))
    }

    async fn act_on_instance(&self, request: Request<ActOnInstanceRequest>) -> Answer<ActOnInstanceResponse> {
        let by = caller(&request)?;
        answer(instances::act(&self.0, request.get_ref(), &by).await)
    }

    async fn get_logs(&self, request: Request<GetLogsRequest>) -> Answer<GetLogsResponse> {
        answer(instances::logs(&self.0, request.get_ref()).await)
    }

    async fn list_guest_sessions(
        &self,
        request: Request<ListGuestSessionsRequest>,
    ) -> Answer<ListGuestSessionsResponse> {
        answer(guest_sessions::list(&self.0, request.get_ref()).await)
    }

    async fn delete_guest_sessions(
        &self,
        request: Request<DeleteGuestSessionsRequest>,
    ) -> Answer<DeleteGuestSessionsResponse> {
        let by = caller(&request)?;
        answer(guest_sessions::delete(&self.0, request.get_ref(), &by).await)
    }

    async fn get_trust(&self, _: Request<GetTrustRequest>) -> Answer<TrustState> {
        Ok(Response::new(trust::state(&self.0.trust.current())))
    }

    async fn update_trust(&self, request: Request<UpdateTrustRequest>) -> Answer<TrustState> {
        answer(trust::update(&self.0, request.get_ref()).await)
    }

    async fn list_operators(&self, _: Request<ListOperatorsRequest>) -> Answer<ListOperatorsResponse> {
        let operators = operators::list(&self.0, now()).await;
        answer(operators.map(|operators| ListOperatorsResponse { operators }))
    }

    async fn remove_operator(
        &self,
        request: Request<RemoveOperatorRequest>,
    ) -> Answer<RemoveOperatorResponse> {
        let RemoveOperatorRequest { name, force } = request.get_ref();
        let removed = operators::remove(&self.0, name, *force, now()).await;
        answer(removed.map(|operator| RemoveOperatorResponse { operator: Some(operator) }))
    }

    async fn renew_certificate(
        &self,
        request: Request<RenewCertificateRequest>,
    ) -> Answer<RenewCertificateResponse> {
        let identity = caller(&request)?;
        let proven = request.extensions().get::<GrpcPeer>().and_then(|peer| peer.proven.as_ref());
        let presented = proven.map(|(_, certificate)| certificate.fingerprint);
        let csr_der = &request.get_ref().csr_der;
        let renewed = enrolment::renew(&self.0, &identity, presented.as_ref(), csr_der, now()).await;
        let renewed = renewed.map_err(NotRenewed::into_problem);
        answer(renewed.map(|issued| RenewCertificateResponse {
            chain_pem: issued.chain_pem(),
            roots_pem: self.0.anchors.current().to_pem(),
            endorsements_pem: self.0.endorsements_pem.clone(),
        }))
    }
}

impl Service {
    async fn new_token(
        &self,
        request: &CreateTokenRequest,
        by: &Identity,
    ) -> Result<CreateTokenResponse, Problem> {
        let state = &self.0;
        let node: NodeId = parse("node_id", &request.node_id)?;
        // During a change of roots the first is the one that this coordinator's own chain leads to.
        let fingerprint = state.anchors.current().fingerprints().first().copied();
        let certificate = fingerprint.ok_or_else(|| refuse::bad_request("there is no root certificate"))?;
        let roots = PinnedRoots { certificate, trust: state.trust.current().root_digest() };
        let names = enrolment::token_names(state, &request.names)?;
        let ttl = Duration::from_secs(request.ttl_seconds);
        let now = now();
        let created = tokens::create(&state.store, node, ttl, by.name(), roots, names, now);
        let (text, record) = created.await?;
        state.metrics.tokens_created.inc();
        tracing::info!(token = %record.token_id, node = %record.node_id, by = %by.name(), "made a join token");
        Ok(CreateTokenResponse { token: text.to_string(), record: Some(tokens::message(&record, now)) })
    }

    async fn document(&self, request: &GetDocumentRequest) -> Result<StoredDocument, Problem> {
        let node: NodeId = parse("node_id", &request.node_id)?;
        enrolment::registered(&self.0, &node).await?;
        let stored = self.0.documents.load(&node).await?.ok_or_else(|| {
            let detail = format!("no document was pushed to node {node}");
            Problem::new(404, "no_document", detail, "Push one: `mvm push -f doc.json`.")
        })?;
        Ok(StoredDocument {
            envelope: stored.envelope.into(),
            mark: Some(stored.assigned.mark()),
            issued_at: stored.assigned.issued_at.to_string(),
            expires_at: stored.assigned.expires_at.to_string(),
        })
    }
}
