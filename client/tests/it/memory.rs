//! Keeps objects in memory and speaks `Objects`: pages of three, every change numbered, watches by a broadcast.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use mvm_client::Objects;
use mvm_proto::Problem;
use mvm_proto::object::{FieldSelector, Object, read};
use mvm_proto::problem::PROBLEM_METADATA;
use mvm_proto::wire::objects::v1::objects_server::{self, ObjectsServer};
use mvm_proto::wire::objects::v1::{
    ApplyRequest, ApplyResponse, DeleteRequest, DeleteResponse, DemandRequest, DemandResponse,
    ExplainRequest, ExplainResponse, GetRequest, ListEventsRequest, ListEventsResponse, ListRequest,
    ListResponse, ObjectJson, ObjectRef, PlanRequest, PlanResponse, TellLoadRequest, TellLoadResponse,
    WatchEvent, WatchRequest,
};
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio_stream::wrappers::{TcpListenerStream, WatchStream};
use tonic::metadata::MetadataValue;
use tonic::transport::Endpoint;
use tonic::{Code, Request, Response, Status};

const PAGE: usize = 3;

#[derive(Debug, Default)]
struct Kept {
    objects: BTreeMap<String, Object>,
    /// With the version that each led to.
    changes: Vec<(u64, &'static str, Object)>,
    version: u64,
    pages: usize,
}

/// A server that can be stopped and started again at its address, with what it keeps.
pub(crate) struct Server {
    service: Service,
    /// Open all the time, so that no other process gets the port: a connection to a stopped server waits for it.
    listener: std::net::TcpListener,
    running: Option<Runtime>,
}

/// Ends when its connections are closed.
fn end(running: Runtime) {
    // A runtime may not wait within another.
    std::thread::spawn(move || running.shutdown_timeout(crate::PATIENCE)).join().unwrap();
}

impl Drop for Server {
    fn drop(&mut self) {
        self.running.take().into_iter().for_each(end);
    }
}

#[derive(Clone)]
struct Service {
    kept: Arc<Mutex<Kept>>,
    version: watch::Sender<u64>,
}

/// The client of a server that is not there.
pub(crate) fn of_no_server() -> Objects {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    objects_at(listener.local_addr().unwrap())
}

fn objects_at(address: SocketAddr) -> Objects {
    Objects::new(Endpoint::from_shared(format!("http://{address}")).unwrap().connect_lazy().into())
}

impl Server {
    pub(crate) fn start() -> Self {
        let service = Service { kept: Arc::default(), version: watch::Sender::new(0) };
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut server = Self { service, listener, running: None };
        server.go_on();
        server
    }

    /// Closes every connection and every stream.
    pub(crate) fn stop(&mut self) {
        self.running.take().into_iter().for_each(end);
    }

    /// Serves at the same address.
    pub(crate) fn go_on(&mut self) {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (service, listener) = (self.service.clone(), self.listener.try_clone().unwrap());
        runtime.spawn(async move {
            let listener = TcpListener::from_std(listener).unwrap();
            let serving = tonic::transport::Server::builder().add_service(ObjectsServer::new(service));
            serving.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        self.running = Some(runtime);
    }

    pub(crate) fn objects(&self) -> Objects {
        objects_at(self.listener.local_addr().unwrap())
    }

    /// How many pages of lists were asked for.
    pub(crate) fn pages(&self) -> usize {
        self.service.kept.lock().unwrap().pages
    }

    /// Makes a pool without a request.
    pub(crate) fn change(&self, name: &str) {
        let json = crate::pool(name, 1).to_string();
        self.service.kept.lock().unwrap().put(declared(json.as_bytes()));
    }

    pub(crate) fn forget_changes(&self) {
        self.service.kept.lock().unwrap().changes.clear();
    }
}

impl Kept {
    fn put(&mut self, mut object: Object) -> &'static str {
        let key = key_of(&object);
        let (outcome, r#type) = match self.objects.get(&key) {
            Some(old) if old.spec == object.spec => return "unchanged",
            Some(_) => ("configured", "modified"),
            None => ("created", "added"),
        };
        self.version += 1;
        object.metadata.resource_version = self.version.to_string();
        self.changes.push((self.version, r#type, object.clone()));
        self.objects.insert(key, object);
        outcome
    }
}

fn declared(json: &[u8]) -> Object {
    let declared = read(json).unwrap();
    Object {
        api_version: "mvm/v1".to_owned(),
        kind: declared.kind.name.to_owned(),
        metadata: declared.metadata,
        spec: declared.spec,
        status: serde_json::Value::Null,
    }
}

fn key(kind: &str, tenant: &str, name: &str) -> String {
    format!("{kind}/{tenant}/{name}")
}

fn key_of(object: &Object) -> String {
    let kind = mvm_proto::object::kind_named(&object.kind).unwrap().plural;
    let tenant = object.metadata.tenant.as_ref().map(ToString::to_string);
    key(kind, &tenant.unwrap_or_default(), &object.metadata.name)
}

fn carried(object: &Object) -> ObjectJson {
    ObjectJson {
        r#ref: None,
        resource_version: object.metadata.resource_version.clone(),
        json: serde_json::to_vec(object).unwrap(),
    }
}

fn refuse(code: Code, problem: &Problem) -> Status {
    let mut status = Status::new(code, problem.detail.clone());
    let value = MetadataValue::from_bytes(&serde_json::to_vec(problem).unwrap());
    status.metadata_mut().insert_bin(PROBLEM_METADATA, value);
    status
}

fn not_found(key: &str) -> Status {
    refuse(Code::NotFound, &Problem::new(404, "not_found", format!("there is no {key}"), ""))
}

impl Service {
    fn found(&self, name: Option<ObjectRef>) -> Result<Object, Status> {
        let ObjectRef { kind, tenant, name } = name.unwrap();
        let key = key(&kind, &tenant, &name);
        self.kept.lock().unwrap().objects.get(&key).cloned().ok_or_else(|| not_found(&key))
    }
}

#[tonic::async_trait]
impl objects_server::Objects for Service {
    type WatchStream = BoxStream<'static, Result<WatchEvent, Status>>;

    async fn get(&self, request: Request<GetRequest>) -> Result<Response<ObjectJson>, Status> {
        Ok(Response::new(carried(&self.found(request.into_inner().r#ref)?)))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        let request = request.into_inner();
        let fields: FieldSelector = request.field_selector.parse().unwrap();
        let mut kept = self.kept.lock().unwrap();
        kept.pages += 1;
        let from: usize = request.continue_from.parse().unwrap_or(0);
        let all: Vec<_> = kept.objects.values().filter(|object| fields.matches(object)).collect();
        let page = all.iter().skip(from).take(PAGE).map(|object| carried(object)).collect();
        let continue_from = if from + PAGE < all.len() { (from + PAGE).to_string() } else { String::new() };
        let resource_version = kept.version.to_string();
        Ok(Response::new(ListResponse { objects: page, continue_from, resource_version }))
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let request = request.into_inner();
        let from: u64 = request.resource_version.parse().unwrap();
        {
            let kept = self.kept.lock().unwrap();
            let oldest = kept.changes.first().map_or(kept.version + 1, |(version, ..)| *version);
            if from + 1 < oldest {
                return Err(refuse(Code::OutOfRange, &Problem::new(410, "gone", "too old", "list again")));
            }
        }
        let fields: FieldSelector = request.field_selector.parse().unwrap();
        let kept = Arc::clone(&self.kept);
        let mut sent = from;
        let versions = WatchStream::new(self.version.subscribe());
        let events = versions.flat_map(move |_| {
            let kept = kept.lock().unwrap();
            let news = kept.changes.iter().filter(|(version, ..)| *version > sent);
            let events: Vec<_> = news
                .map(|(version, r#type, object)| {
                    // As a coordinator does: it does not know what its client has been told of.
                    let r#type = if fields.matches(object) { *r#type } else { "deleted" };
                    Ok(WatchEvent {
                        r#type: r#type.to_owned(),
                        object: Some(carried(object)),
                        resource_version: version.to_string(),
                    })
                })
                .collect();
            sent = kept.version;
            stream::iter(events)
        });
        Ok(Response::new(events.boxed()))
    }

    async fn apply(&self, request: Request<ApplyRequest>) -> Result<Response<ApplyResponse>, Status> {
        let request = request.into_inner();
        assert_eq!(request.idempotency_key.len(), 32);
        let object = declared(&request.json);
        let mut kept = self.kept.lock().unwrap();
        let key = key_of(&object);
        let outcome = if request.dry_run { "created" } else { kept.put(object.clone()) };
        self.version.send_replace(kept.version);
        let object = Some(carried(kept.objects.get(&key).unwrap_or(&object)));
        Ok(Response::new(ApplyResponse { outcome: outcome.to_owned(), object, secret: String::new() }))
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Result<Response<DeleteResponse>, Status> {
        let object = self.found(request.into_inner().r#ref)?;
        let mut kept = self.kept.lock().unwrap();
        kept.objects.remove(&key_of(&object));
        kept.version += 1;
        let version = kept.version;
        kept.changes.push((version, "deleted", object.clone()));
        self.version.send_replace(version);
        Ok(Response::new(DeleteResponse { gone: true, object: Some(carried(&object)) }))
    }

    async fn plan(&self, _: Request<PlanRequest>) -> Result<Response<PlanResponse>, Status> {
        Err(Status::unimplemented("it places nothing"))
    }

    async fn explain(&self, _: Request<ExplainRequest>) -> Result<Response<ExplainResponse>, Status> {
        Err(Status::unimplemented("it places nothing"))
    }

    async fn tell_load(&self, _: Request<TellLoadRequest>) -> Result<Response<TellLoadResponse>, Status> {
        Err(Status::unimplemented("it scales nothing"))
    }

    async fn demand(&self, _: Request<DemandRequest>) -> Result<Response<DemandResponse>, Status> {
        Err(Status::unimplemented("it places nothing"))
    }

    async fn list_events(
        &self,
        _: Request<ListEventsRequest>,
    ) -> Result<Response<ListEventsResponse>, Status> {
        Err(Status::unimplemented("nothing happens to its objects"))
    }
}
