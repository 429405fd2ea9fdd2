//! Through a coordinator, from whichever node has the instance.

use mvm_client::{Channel, Logs, LogsEvent};
use mvm_proto::wire::tunnel::v1::{self as wire, Open};

use super::{LogsArgs, Shown};
use crate::client::stream_failed;
use crate::exit::Run;
use crate::global::Global;

pub(super) async fn run(global: &Global, args: &LogsArgs, channel: Channel) -> Run {
    let header = header(args, global.open_within_ms());
    let mut logs = Logs::open(channel, header).await.map_err(|error| stream_failed(error, ""))?;
    let mut shown = Shown::new(global, args);
    loop {
        match logs.next().await.map_err(|error| stream_failed(error, ""))? {
            Some(LogsEvent::Piece { data, lost, .. }) => {
                shown.lose(lost);
                shown.show(&data)?;
            }
            Some(LogsEvent::Resuming) => shown.progress.say("lost the connection; going on where it was ..."),
            None => return Ok(shown.finish()?),
        }
    }
}

fn header(args: &LogsArgs, open_within_ms: u32) -> Open {
    let (tenant, pool) = args.instance.pool.clone().unzip();
    let logs = wire::Logs {
        tail_bytes: args.bytes().unwrap_or(0).into(),
        tail_lines: args.tail,
        follow: args.follow,
        since: args.since.map(|since| since.to_string()).unwrap_or_default(),
        offset: None,
    };
    Open {
        tenant_id: tenant.map(|tenant| tenant.to_string()).unwrap_or_default(),
        pool_id: pool.map(|pool| pool.to_string()).unwrap_or_default(),
        instance_id: args.instance.id.to_string(),
        node_id: args.endpoint.node().map(ToString::to_string).unwrap_or_default(),
        open_within_ms,
        logs: Some(logs),
        ..Open::default()
    }
}
