//! The laws of migration between two nodes, each with a driver of its own.

use std::io::{Read as _, Seek as _, Write as _};

use mvm_proto::Digest;

use super::{Broken, Held, Subject, done, same, spec, state};
use crate::{Driver, DriverError, Migration, Part, SnapshotOptions, SnapshotRef, VmSpec, VmState};

/// One that sleeps.
async fn asleep<D: Driver>(law: &'static str, driver: &D, spec: &VmSpec) -> Result<SnapshotRef, Broken> {
    done(law, driver.boot(spec).await)?;
    done(law, driver.pause(&spec.instance).await)?;
    let saved = done(law, driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await)?;
    done(law, driver.kill(&spec.instance).await)?;
    Ok(saved)
}

fn migration<'a, D: Driver>(law: &'static str, driver: &'a D) -> Result<&'a dyn Migration, Broken> {
    done(law, driver.migration())
}

/// Copies every part, as an archive and a network between the two would; `change` is done to the bytes on the way.
async fn copy<D: Driver>(
    law: &'static str,
    to: &D,
    spec: &VmSpec,
    parts: Vec<Part>,
    change: impl Fn(&str, &mut Vec<u8>),
) -> Held {
    done(law, migration(law, to)?.begin_import(&spec.instance).await)?;
    for Part { name, mut file } in parts {
        let mut bytes = Vec::new();
        done(law, file.rewind().and_then(|()| file.read_to_end(&mut bytes)))?;
        change(&name, &mut bytes);
        let mut file = done(law, migration(law, to)?.import_part(&spec.instance, &name).await)?;
        done(law, file.write_all(&bytes).and_then(|()| file.sync_all()))?;
    }
    Ok(())
}

/// What sleeps under one driver is woken under another, and nothing half or other is.
pub async fn migration_suite<D: Driver>(from: &D, to: &D, subject: &Subject) -> Held {
    a_sleeper_goes_on_elsewhere(from, to, &spec(subject, 30)).await?;
    what_does_not_fit_or_is_damaged_is_refused(from, to, &spec(subject, 31)).await
}

async fn a_sleeper_goes_on_elsewhere<D: Driver>(from: &D, to: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "what sleeps goes on elsewhere, and is where it was until it is removed";
    let saved = asleep(LAW, from, spec).await?;
    let parts = done(LAW, migration(LAW, from)?.export(&saved).await)?;
    copy(LAW, to, spec, parts, |_, _| {}).await?;
    same(LAW, done(LAW, to.instances().await)?.contains(&spec.instance), true)?;
    let early = to.restore(spec, &saved, &SnapshotOptions::plain()).await;
    same(LAW, matches!(early, Err(DriverError::NoSnapshot { .. })), true)?;
    let arrived = done(LAW, migration(LAW, to)?.import(spec, &saved, &SnapshotOptions::plain()).await)?;
    same(LAW, state(LAW, to, spec).await?, None)?;
    done(LAW, to.restore(spec, &arrived, &SnapshotOptions::plain()).await)?;
    same(LAW, state(LAW, to, spec).await?, Some(VmState::Paused))?;
    done(LAW, to.resume(&spec.instance).await)?;
    done(LAW, to.remove(&spec.instance).await)?;
    // Exporting took nothing away.
    done(LAW, from.restore(spec, &saved, &SnapshotOptions::plain()).await)?;
    done(LAW, from.remove(&spec.instance).await)?;
    let gone = migration(LAW, from)?.export(&saved).await;
    same(LAW, matches!(gone, Err(DriverError::NoSnapshot { .. })), true)
}

async fn what_does_not_fit_or_is_damaged_is_refused<D: Driver>(from: &D, to: &D, spec: &VmSpec) -> Held {
    const LAW: &str = "what does not fit, is damaged or incomplete never becomes a snapshot";
    let saved = asleep(LAW, from, spec).await?;
    let parts = async || done(LAW, migration(LAW, from)?.export(&saved).await);
    let refused = |imported: Result<SnapshotRef, DriverError>| {
        matches!(imported, Err(DriverError::Unusable { .. } | DriverError::OtherRevision { .. }))
    };
    // The memory alone, and all of it: what is neither memory nor names it is the archive's to keep whole.
    let longest = |part: &Part| part.file.metadata().map_or(0, |found| found.len());
    let memory = parts().await?.into_iter().max_by_key(longest).map(|part| part.name);
    for only in [memory.as_deref(), None] {
        let flip = |name: &str, bytes: &mut Vec<u8>| {
            let middle = bytes.len() / 2;
            if only.is_none_or(|only| only == name)
                && let Some(byte) = bytes.get_mut(middle)
            {
                *byte ^= 1;
            }
        };
        copy(LAW, to, spec, parts().await?, flip).await?;
        same(LAW, refused(migration(LAW, to)?.import(spec, &saved, &SnapshotOptions::plain()).await), true)?;
    }
    copy(LAW, to, spec, parts().await?, |_, bytes| bytes.truncate(bytes.len() / 2)).await?;
    same(LAW, refused(migration(LAW, to)?.import(spec, &saved, &SnapshotOptions::plain()).await), true)?;
    copy(LAW, to, spec, Vec::new(), |_, _| {}).await?;
    same(LAW, refused(migration(LAW, to)?.import(spec, &saved, &SnapshotOptions::plain()).await), true)?;
    copy(LAW, to, spec, parts().await?, |_, _| {}).await?;
    let other = VmSpec { revision: Digest::of(b"another revision"), ..spec.clone() };
    same(LAW, refused(migration(LAW, to)?.import(&other, &saved, &SnapshotOptions::plain()).await), true)?;
    for name in ["../../elsewhere", "snapshot/../vmm.json", "vmm.json", ""] {
        let part = migration(LAW, to)?.import_part(&spec.instance, name).await;
        same(LAW, matches!(part, Err(DriverError::Unusable { .. })), true)?;
    }
    done(LAW, to.remove(&spec.instance).await)?;
    same(LAW, done(LAW, to.instances().await)?.contains(&spec.instance), false)?;
    done(LAW, from.remove(&spec.instance).await)
}
