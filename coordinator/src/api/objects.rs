//! Declared objects over gRPC.

use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use mvm_proto::object::{Kind, Object, kind_named, read};
use mvm_proto::wire::objects::v1::objects_server::Objects;
use mvm_proto::wire::objects::v1::{
    ApplyRequest, ApplyResponse, DeleteRequest, DeleteResponse, DemandRequest, DemandResponse,
    ExplainRequest, ExplainResponse, GetRequest, ListEventsRequest, ListEventsResponse, ListRequest,
    ListResponse, ObjectJson, ObjectRef, PlanRequest, PlanResponse, TellLoadRequest, TellLoadResponse,
    WatchEvent, WatchRequest,
};
use mvm_proto::{Problem, TenantId};
use tonic::{Request, Response};

use super::identify::Identified;
use super::object_events::{self, Asked};
use super::{Answer, answer};
use crate::objects::{
    Caller, DeleteOptions, Filter, Mode, Watching, Writing, apply, delete, get, list, watch,
};
use crate::placement::show_live;
use crate::refuse;
use crate::state::State;
use crate::stored::now;

pub(super) struct ObjectService(pub(super) Arc<State>);

/// A reference of a request: its kind, tenant and name.
struct Named {
    kind: &'static Kind,
    tenant: Option<TenantId>,
    name: String,
}

fn named(reference: Option<ObjectRef>) -> Result<Named, Problem> {
    let ObjectRef { kind, tenant, name } = reference.unwrap_or_default();
    let kind = self::kind(&kind)?;
    let tenant = tenant_of(kind, &tenant)?;
    Ok(Named { kind, tenant, name })
}

fn kind(text: &str) -> Result<&'static Kind, Problem> {
    kind_named(text)
        .map_err(|rule| Problem::new(404, "kind_unknown", rule, "See the kinds: `mvm get --help`."))
}

/// The tenant of an object of this kind: there where the kind's objects have one, and only there.
pub(super) fn tenant_of(kind: &Kind, text: &str) -> Result<Option<TenantId>, Problem> {
    match (kind.is_tenant_scoped(), text) {
        (true, "") => {
            let detail = format!("{} belong to a tenant, and the request names none", kind.plural);
            Err(Problem::new(400, "tenant_missing", detail, "Name the tenant: `-t TENANT`, or TENANT/NAME."))
        }
        (true, text) => {
            text.parse().map(Some).map_err(|error| refuse::bad_request(format!("tenant {error}")))
        }
        (false, _) => Ok(None),
    }
}

/// An object as the wire has it.
fn message(object: &Object) -> ObjectJson {
    let tenant = object.metadata.tenant.as_ref().map(ToString::to_string).unwrap_or_default();
    let reference = ObjectRef { kind: object.kind.clone(), tenant, name: object.metadata.name.clone() };
    ObjectJson {
        r#ref: Some(reference),
        resource_version: object.metadata.resource_version.clone(),
        json: serde_json::to_vec(object).unwrap_or_default(),
    }
}

fn caller<T>(request: &Request<T>) -> Result<Caller, Problem> {
    let identified = request.extensions().get::<Identified>();
    identified.map_or_else(|| Err(refuse::no_credential()), |identified| identified.0.clone())
}

impl ObjectService {
    async fn get(&self, request: Request<GetRequest>) -> Result<ObjectJson, Problem> {
        let caller = caller(&request)?;
        let Named { kind, tenant, name } = named(request.into_inner().r#ref)?;
        let mut object = get(&self.0.store, &caller, kind, tenant.as_ref(), &name).await?;
        show_live(&self.0, &mut object);
        Ok(message(&object))
    }

    async fn list(&self, request: Request<ListRequest>) -> Result<ListResponse, Problem> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let kind = kind(&request.kind)?;
        let filter = Filter::new(&request.tenant, &request.label_selector, &request.field_selector)?;
        let filter = filter.within(&caller, kind);
        let limit = usize::try_from(request.limit).unwrap_or(usize::MAX);
        let mut page = list(&self.0.store, &caller, kind, &filter, limit, &request.continue_from).await?;
        page.objects.iter_mut().for_each(|object| show_live(&self.0, object));
        Ok(ListResponse {
            objects: page.objects.iter().map(message).collect(),
            continue_from: page.continue_from,
            resource_version: page.revision.to_string(),
        })
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Watching, Problem> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let kind = kind(&request.kind)?;
        let filter = Filter::new(&request.tenant, &request.label_selector, &request.field_selector)?;
        watch(&self.0.store, &caller, kind, filter.within(&caller, kind), &request.resource_version).await
    }

    async fn apply(&self, request: Request<ApplyRequest>) -> Result<ApplyResponse, Problem> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let declared =
            read(&request.json).map_err(|errors| refuse::invalid("the object").with_errors(errors))?;
        let written = apply(
            &self.0.objects,
            Writing {
                caller: &caller,
                declared,
                mode: if request.create_only { Mode::Create } else { Mode::Apply },
                dry_run: request.dry_run,
                idempotency_key: Some(request.idempotency_key.as_str()).filter(|key| !key.is_empty()),
            },
        )
        .await?;
        Ok(ApplyResponse {
            outcome: written.outcome.as_str().to_owned(),
            object: Some(message(&written.object)),
            secret: written.secret.unwrap_or_default(),
        })
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Result<DeleteResponse, Problem> {
        let caller = caller(&request)?;
        let DeleteRequest { r#ref, resource_version, dry_run, force } = request.into_inner();
        let Named { kind, tenant, name } = named(r#ref)?;
        let options = DeleteOptions { resource_version: &resource_version, dry_run, force };
        let removed = delete(&self.0.objects, &caller, kind, tenant.as_ref(), &name, &options).await?;
        Ok(DeleteResponse { gone: removed.gone, object: Some(message(&removed.object)) })
    }

    async fn plan(&self, request: Request<PlanRequest>) -> Result<PlanResponse, Problem> {
        let caller = caller(&request)?;
        let PlanRequest { objects, deleted } = request.into_inner();
        let mut declared = Vec::new();
        for json in &objects {
            declared.push(read(json).map_err(|errors| refuse::invalid("the object").with_errors(errors))?);
        }
        let deleted: Vec<_> = deleted
            .into_iter()
            .map(|reference| named(Some(reference)).map(|named| (named.kind, named.tenant, named.name)))
            .collect::<Result<_, _>>()?;
        let plan = crate::placement::plan(&self.0, &caller, &declared, &deleted).await?;
        Ok(PlanResponse { json: serde_json::to_vec(&plan).unwrap_or_default() })
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Result<ExplainResponse, Problem> {
        let caller = caller(&request)?;
        let Named { kind, tenant, name } = named(request.into_inner().r#ref)?;
        let explanation = crate::placement::explain(&self.0, &caller, kind, tenant.as_ref(), &name).await?;
        Ok(ExplainResponse { json: serde_json::to_vec(&explanation).unwrap_or_default() })
    }

    async fn tell_load(&self, request: Request<TellLoadRequest>) -> Result<TellLoadResponse, Problem> {
        let caller = caller(&request)?;
        let TellLoadRequest { r#ref, value } = request.into_inner();
        let Named { kind, tenant, name } = named(r#ref)?;
        let Some(tenant) = tenant.filter(|_| kind.name == "Pool") else {
            return Err(refuse::bad_request("only pools have a load".to_owned()));
        };
        let status = crate::placement::measured(&self.0, &caller, &tenant, &name, value).await?;
        Ok(TellLoadResponse { json: serde_json::to_vec(&status).unwrap_or_default() })
    }

    fn demand(&self, request: &Request<DemandRequest>) -> Result<DemandResponse, Problem> {
        let demand = crate::placement::demand(&self.0, &caller(request)?)?;
        Ok(DemandResponse { json: serde_json::to_vec(&demand).unwrap_or_default() })
    }

    async fn list_events(&self, request: Request<ListEventsRequest>) -> Result<ListEventsResponse, Problem> {
        let caller = caller(&request)?;
        let ListEventsRequest { r#ref, tenant } = request.into_inner();
        let object = r#ref.map(|reference| named(Some(reference))).transpose()?;
        let asked = Asked {
            object: object.map(|Named { kind, tenant, name }| (kind, tenant, name)),
            tenant: match tenant.as_str() {
                "" => None,
                text => Some(text.parse().map_err(|error| refuse::bad_request(format!("tenant {error}")))?),
            },
        };
        let found = object_events::list(&self.0, &caller, &asked, now()).await?;
        let json = found.iter().map(|event| serde_json::to_vec(event).unwrap_or_default());
        Ok(ListEventsResponse { json: json.collect() })
    }
}

#[tonic::async_trait]
impl Objects for ObjectService {
    async fn get(&self, request: Request<GetRequest>) -> Answer<ObjectJson> {
        answer(self.get(request).await)
    }

    async fn list(&self, request: Request<ListRequest>) -> Answer<ListResponse> {
        answer(self.list(request).await)
    }

    type WatchStream = BoxStream<'static, Result<WatchEvent, tonic::Status>>;

    async fn watch(&self, request: Request<WatchRequest>) -> Answer<Self::WatchStream> {
        let watching = self.watch(request).await.map_err(|problem| refuse::status(&problem))?;
        let shutdown = self.0.shutdown.clone();
        let events = stream::unfold(Some((watching, shutdown)), |watching| async {
            let (mut watching, shutdown) = watching?;
            let next = tokio::select! {
                next = watching.next() => next,
                () = shutdown.cancelled() => Err(refuse::stopping()),
            };
            match next {
                Ok((changed, object, version)) => {
                    let event = WatchEvent {
                        r#type: changed.as_str().to_owned(),
                        object: object.as_ref().map(message),
                        resource_version: version.to_string(),
                    };
                    Some((Ok(event), Some((watching, shutdown))))
                }
                Err(problem) => Some((Err(refuse::status(&problem)), None)),
            }
        });
        Ok(Response::new(events.boxed()))
    }

    async fn apply(&self, request: Request<ApplyRequest>) -> Answer<ApplyResponse> {
        answer(self.apply(request).await)
    }

    async fn delete(&self, request: Request<DeleteRequest>) -> Answer<DeleteResponse> {
        answer(self.delete(request).await)
    }

    async fn plan(&self, request: Request<PlanRequest>) -> Answer<PlanResponse> {
        answer(self.plan(request).await)
    }

    async fn explain(&self, request: Request<ExplainRequest>) -> Answer<ExplainResponse> {
        answer(self.explain(request).await)
    }

    async fn tell_load(&self, request: Request<TellLoadRequest>) -> Answer<TellLoadResponse> {
        answer(self.tell_load(request).await)
    }

    async fn demand(&self, request: Request<DemandRequest>) -> Answer<DemandResponse> {
        answer(self.demand(&request))
    }

    async fn list_events(&self, request: Request<ListEventsRequest>) -> Answer<ListEventsResponse> {
        answer(self.list_events(request).await)
    }
}
