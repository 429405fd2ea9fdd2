//! Declared objects: get, list, apply, delete, plan, explain, demand.

use std::fmt;

use mvm_proto::object::{
    FleetChange, FleetDemand, Kind, Object, ObjectEvent, Outcome, PoolExplanation, PoolScaleStatus,
};
use mvm_proto::wire::MAX_MESSAGE_BYTES;
use mvm_proto::wire::objects::v1::objects_client::ObjectsClient;
use mvm_proto::wire::objects::v1::{
    ApplyRequest, DeleteRequest, DemandRequest, ExplainRequest, GetRequest, ListEventsRequest, ListRequest,
    ObjectJson, ObjectRef, PlanRequest, TellLoadRequest,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::channel::Channel;
use crate::error::CallError;
use crate::watch::Watch;

/// Names one object.
#[derive(Debug, Clone)]
pub struct Name {
    pub kind: &'static Kind,
    /// Of kinds that belong to a tenant.
    pub tenant: Option<String>,
    pub name: String,
}

impl Name {
    /// The name of an object that was read or received.
    #[must_use]
    pub fn of(kind: &'static Kind, tenant: Option<&str>, name: &str) -> Self {
        Self { kind, tenant: tenant.map(str::to_owned), name: name.to_owned() }
    }

    pub(crate) fn wire(&self) -> ObjectRef {
        ObjectRef {
            kind: self.kind.plural.to_owned(),
            tenant: self.tenant.clone().unwrap_or_default(),
            name: self.name.clone(),
        }
    }
}

/// `pool/acme/workers`
impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/", self.kind.name.to_lowercase())?;
        if let Some(tenant) = &self.tenant {
            write!(f, "{tenant}/")?;
        }
        f.write_str(&self.name)
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        self.kind.name == other.kind.name && self.tenant == other.tenant && self.name == other.name
    }
}

impl Eq for Name {}

/// Which objects are listed or watched.
#[derive(Debug, Clone)]
pub struct Query {
    pub kind: &'static Kind,
    /// None: of all tenants.
    pub tenant: Option<String>,
    /// `team=search,env in (a,b)`; empty: all.
    pub labels: String,
    /// `spec.cordoned=true`; empty: all.
    pub fields: String,
}

impl Query {
    /// All objects of a kind.
    #[must_use]
    pub fn all(kind: &'static Kind) -> Self {
        Self { kind, tenant: None, labels: String::new(), fields: String::new() }
    }

    /// One object, by its name.
    #[must_use]
    pub fn one(name: &Name) -> Self {
        let fields = format!("metadata.name={}", name.name);
        Self { tenant: name.tenant.clone(), fields, ..Self::all(name.kind) }
    }
}

/// A list, and the version from which a watch misses nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct Listing {
    pub objects: Vec<Object>,
    pub resource_version: String,
}

#[derive(Debug, Clone, Copy, Default)]
pub struct ApplyOptions {
    /// Everything but the writing.
    pub dry_run: bool,
    /// Refuse an object that is there.
    pub create_only: bool,
}

/// What applying did, or would do.
#[derive(Debug, Clone, PartialEq)]
pub struct Applied {
    pub outcome: Outcome,
    /// As the server has it now.
    pub object: Object,
    /// Of a new key: its text, which is shown this once.
    pub secret: Option<String>,
}

#[derive(Debug, Clone, Default)]
pub struct DeleteOptions {
    /// Refuse when it has changed since; empty: whatever it is now.
    pub resource_version: String,
    pub dry_run: bool,
    /// Without its finalizers: what runs is left as it is.
    pub force: bool,
}

/// What deleting did, or would do.
#[derive(Debug, Clone, PartialEq)]
pub struct Deleted {
    /// False: it goes when its finalizers are done.
    pub gone: bool,
    pub object: Object,
}

/// The client of declared objects. Cheap to clone; clones share the connection.
#[derive(Debug, Clone)]
pub struct Objects {
    client: ObjectsClient<Channel>,
}

impl Objects {
    #[must_use]
    pub fn new(channel: Channel) -> Self {
        let client = ObjectsClient::new(channel)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES);
        Self { client }
    }

    pub(crate) fn generated(&mut self) -> &mut ObjectsClient<Channel> {
        &mut self.client
    }

    /// One object as it is now.
    pub async fn get(&mut self, name: &Name) -> Result<Object, CallError> {
        let answer = self.client.get(GetRequest { r#ref: Some(name.wire()) }).await?;
        object(&answer.into_inner())
    }

    /// The object, or none where there is none.
    pub async fn find(&mut self, name: &Name) -> Result<Option<Object>, CallError> {
        match self.get(name).await {
            Ok(object) => Ok(Some(object)),
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// All that the query selects, page by page.
    pub async fn list(&mut self, query: &Query) -> Result<Listing, CallError> {
        let mut request = ListRequest {
            kind: query.kind.plural.to_owned(),
            tenant: query.tenant.clone().unwrap_or_default(),
            label_selector: query.labels.clone(),
            field_selector: query.fields.clone(),
            limit: 0,
            continue_from: String::new(),
        };
        let mut objects = Vec::new();
        // Of the first page: what changes while the others are read is told by a watch from there.
        let mut resource_version = None;
        loop {
            let page = self.client.list(request.clone()).await?.into_inner();
            for listed in &page.objects {
                objects.push(object(listed)?);
            }
            let resource_version =
                resource_version.get_or_insert_with(|| page.resource_version.clone()).clone();
            // A page that leads to itself would never end.
            if page.continue_from.is_empty() || page.continue_from == request.continue_from {
                return Ok(Listing { objects, resource_version });
            }
            request.continue_from = page.continue_from;
        }
    }

    /// What the query selects, then each change of it. Survives lost connections; see [`Watch`].
    #[must_use]
    pub fn watch(&self, query: Query) -> Watch {
        Watch::new(self.clone(), query)
    }

    /// Creates the object, or changes it to what is declared.
    pub async fn apply<T: Serialize>(
        &mut self,
        declared: &T,
        options: ApplyOptions,
    ) -> Result<Applied, CallError> {
        let ApplyOptions { dry_run, create_only } = options;
        let json = serde_json::to_vec(declared).map_err(CallError::Request)?;
        let idempotency_key = format!("{:032x}", fastrand::u128(..));
        let request = ApplyRequest { json, dry_run, create_only, idempotency_key };
        let answer = self.client.apply(request).await?.into_inner();
        let outcome = read(format!("\"{}\"", answer.outcome).as_bytes(), "the outcome")?;
        let secret = Some(answer.secret).filter(|secret| !secret.is_empty());
        Ok(Applied { outcome, object: carried(answer.object.as_ref())?, secret })
    }

    /// Deletes the object, or begins to: it goes when its finalizers are done.
    pub async fn delete(&mut self, name: &Name, options: &DeleteOptions) -> Result<Deleted, CallError> {
        let request = DeleteRequest {
            r#ref: Some(name.wire()),
            resource_version: options.resource_version.clone(),
            dry_run: options.dry_run,
            force: options.force,
        };
        let answer = self.client.delete(request).await?.into_inner();
        Ok(Deleted { gone: answer.gone, object: carried(answer.object.as_ref())? })
    }

    /// What applying and deleting these would do to objects and nodes; nothing changes.
    pub async fn plan<T: Serialize>(
        &mut self,
        declared: &[T],
        deleted: &[Name],
    ) -> Result<FleetChange, CallError> {
        let objects = declared.iter().map(serde_json::to_vec).collect::<Result<_, _>>();
        let request = PlanRequest {
            objects: objects.map_err(CallError::Request)?,
            deleted: deleted.iter().map(Name::wire).collect(),
        };
        read(&self.client.plan(request).await?.into_inner().json, "the plan")
    }

    /// Why a pool is where it is.
    pub async fn explain(&mut self, name: &Name) -> Result<PoolExplanation, CallError> {
        let request = ExplainRequest { r#ref: Some(name.wire()) };
        read(&self.client.explain(request).await?.into_inner().json, "the explanation")
    }

    /// Tells what was measured of the load of a pool that is scaled by that; how many run of it, as was decided last.
    pub async fn tell_load(&mut self, pool: &Name, value: f64) -> Result<PoolScaleStatus, CallError> {
        let request = TellLoadRequest { r#ref: Some(pool.wire()), value };
        read(&self.client.tell_load(request).await?.into_inner().json, "how the pool is scaled")
    }

    /// What has no place for want of nodes, and which nodes have nothing.
    pub async fn demand(&mut self) -> Result<FleetDemand, CallError> {
        read(&self.client.demand(DemandRequest {}).await?.into_inner().json, "the demand")
    }

    /// What happened to one object lately, or to all that the caller may see; the newest last.
    pub async fn events(&mut self, of: Option<&Name>) -> Result<Vec<ObjectEvent>, CallError> {
        let request = ListEventsRequest { r#ref: of.map(Name::wire), tenant: String::new() };
        let found = self.client.list_events(request).await?.into_inner().json;
        found.iter().map(|json| read(json, "an event")).collect()
    }

    /// Waits until the condition holds of the object, which is none while there is no such object; gives it as it was
    /// then. Waits without end: put a `tokio::time::timeout` around it.
    pub async fn wait_for(
        &self,
        name: &Name,
        mut condition: impl FnMut(Option<&Object>) -> bool,
    ) -> Result<Option<Object>, CallError> {
        use crate::watch::Change;
        let mut watch = self.watch(Query::one(name));
        loop {
            let now = match watch.next().await? {
                Change::Listed(objects) => objects.into_iter().next(),
                Change::Added(object) | Change::Modified(object) => Some(object),
                // An older server tells of objects that were never meant.
                Change::Deleted(object) if object.metadata.name != name.name => continue,
                Change::Deleted(_) => None,
            };
            if condition(now.as_ref()) {
                return Ok(now);
            }
        }
    }
}

fn carried(object: Option<&ObjectJson>) -> Result<Object, CallError> {
    self::object(object.ok_or(CallError::Lacks("the object"))?)
}

pub(crate) fn object(carried: &ObjectJson) -> Result<Object, CallError> {
    let mut object: Object = read(&carried.json, "an object")?;
    if object.metadata.resource_version.is_empty() {
        object.metadata.resource_version.clone_from(&carried.resource_version);
    }
    Ok(object)
}

fn read<T: DeserializeOwned>(json: &[u8], what: &'static str) -> Result<T, CallError> {
    serde_json::from_slice(json).map_err(|cause| CallError::Answer { what, cause })
}
