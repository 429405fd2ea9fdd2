//! An empty process with the runtime and the transport that an agent has: the floor under an idle agent's memory.
//!
//! It binds one QUIC endpoint on loopback and waits until it is killed.

use anyhow::Result;
use mvm_benches::authority::{Certificates, now};
use mvm_benches::bare;

fn main() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        let server = bare::server(&Certificates::make(now())?)?;
        bare::echo_task(server).await;
        Ok(())
    })
}
