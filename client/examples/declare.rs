//! Declares what a file says and waits until every pool in it runs.
//!
//! ```text
//! cargo run -p mvm-client --example declare -- https://127.0.0.1:4433 OPERATOR_DIR examples/objects.yaml
//! ```

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_client::files::{self, Tenant};
use mvm_client::{ApplyOptions, Objects, open};
use mvm_pki::{Anchors, Credential, LiveAnchors, LiveCredential};
use mvm_proto::object::Object;
use mvm_transport::Target;

const LIMIT: Duration = Duration::from_secs(60);

fn is_ready(object: Option<&Object>) -> bool {
    let conditions = object.map(Object::conditions).unwrap_or_default();
    conditions.iter().any(|condition| condition.r#type == "Ready" && condition.status == "True")
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [coordinator, operator_dir, file] = arguments.as_slice() else {
        return Err("usage: declare COORDINATOR OPERATOR_DIR FILE".into());
    };
    let target: Target = coordinator.parse()?;
    let credential = Credential::load(&Path::new(operator_dir).join("operator.pem"))?;
    let anchors = LiveAnchors::new(Anchors::load(&Path::new(operator_dir).join("ca.crt"))?);
    let cluster = credential.identity().cluster().clone();
    let channel = open(&target, &LiveCredential::new(credential), &anchors, &cluster, LIMIT).await?;
    let mut objects = Objects::new(channel);

    // All that is wrong in the file is told here, before anything is sent.
    let declared = files::read(&[PathBuf::from(file)], Tenant::default())?;
    for entry in &declared {
        objects.apply(&entry.json, ApplyOptions::default()).await?;
    }
    for pool in declared.iter().map(files::Entry::name).filter(|name| name.kind.name == "Pool") {
        tokio::time::timeout(LIMIT, objects.wait_for(&pool, is_ready)).await??;
    }
    Ok(())
}
