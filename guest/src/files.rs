//! Files and folders of the guest, read and written for the agent.

mod set_entry;
mod upload;

use std::fs::{self, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::OFlags;

use crate::state::Reading;
pub(crate) use set_entry::set_entry;
pub(crate) use upload::Uploads;

use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::protocol::{CHUNK_BYTES, Chunk, Directory, Entry, ReadFile};
use crate::refusal::Refusal;
use crate::state::Request;
use crate::state::{Guest, spawn};

pub(crate) fn read(guest: &Guest, number: u64, request: ReadFile) {
    stream(guest, number, move |put| read_file(&request, put));
}

pub(crate) fn list(guest: &Guest, number: u64, path: String) {
    stream(guest, number, move |put| list_directory(&path, put));
}

/// Hands over one piece; false: the receiver is gone.
type Put<'a> = &'a mut dyn FnMut(Body, bool) -> bool;

/// A request that is answered in pieces, by a thread that waits until the ones before it have left.
fn stream(guest: &Guest, number: u64, work: impl FnOnce(Put<'_>) -> Result<(), Refusal> + Send + 'static) {
    let refused = guest.update(|state| {
        let open = state.requests.count(|request| matches!(request, Request::Reading(_)));
        match state.requests.all.get(&number) {
            // Asked for again on the same connection: it is on its way.
            Some(Request::Reading(_)) => Some(None),
            Some(_) => Some(Some(Refusal::invalid("this number belongs to another request"))),
            None if open >= limits::MAX_READS => Some(Some(Refusal::busy("files to read"))),
            None => {
                state.requests.all.insert(number, Request::Reading(Reading::default()));
                None
            }
        }
    });
    match refused {
        Some(Some(refusal)) => return guest.refuse(number, refusal),
        Some(None) => return,
        None => {}
    }
    let thread = guest.clone();
    let spawned = spawn("read", move || {
        let mut put = |body, last| put(&thread, number, body, last);
        if let Err(refusal) = work(&mut put) {
            put(refusal.into_body(), true);
        }
    });
    if spawned.is_err() {
        guest.update(|state| state.requests.remove(number));
        guest.refuse(number, Refusal::busy("threads"));
    }
}

fn put(guest: &Guest, number: u64, body: Body, last: bool) -> bool {
    let mut state = guest.lock();
    loop {
        match state.requests.reading(number) {
            None => return false,
            Some(reading) if reading.queue.len() < limits::MAX_QUEUED_CHUNKS => break,
            Some(_) => state = guest.wait(state, None),
        }
    }
    drop(state);
    guest.update(|state| {
        if let Some(reading) = state.requests.reading(number) {
            reading.queue.push_back(body);
            reading.last = last;
        }
    });
    true
}

fn read_file(request: &ReadFile, put: Put<'_>) -> Result<(), Refusal> {
    let failed = |error| Refusal::io(&request.path, &error);
    absolute(&request.path)?;
    // A pipe without a writer would block for ever when opened, and a device has no end.
    let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or(0);
    let mut file =
        OpenOptions::new().read(true).custom_flags(nonblock).open(&request.path).map_err(failed)?;
    if !file.metadata().map_err(failed)?.is_file() {
        return Err(Refusal::invalid(format!("{} is not a regular file", request.path)));
    }
    file.seek(SeekFrom::Start(request.offset)).map_err(failed)?;
    let mut left = if request.limit == 0 { u64::MAX } else { request.limit };
    let mut buffer = vec![0; CHUNK_BYTES];
    loop {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buffer.len());
        let length = file.read(&mut buffer[..most]).map_err(failed)?;
        left -= length as u64;
        let last = length == 0 || left == 0;
        let chunk = Chunk { data: buffer[..length].to_vec(), last };
        if !put(Body::Chunk(chunk), last) || last {
            return Ok(());
        }
    }
}

fn list_directory(path: &str, put: Put<'_>) -> Result<(), Refusal> {
    let failed = |error| Refusal::io(path, &error);
    absolute(path)?;
    let mut entries = Vec::new();
    for entry in fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        // It may be gone by now.
        let Ok(metadata) = entry.metadata() else { continue };
        let ms = |seconds: i64, nanos: i64| seconds.saturating_mul(1000).saturating_add(nanos / 1_000_000);
        let target = if metadata.is_symlink() { fs::read_link(entry.path()).ok() } else { None };
        entries.push(Entry {
            name: entry.file_name().to_string_lossy().into_owned(),
            mode: metadata.mode(),
            size: metadata.len(),
            modified_ms: ms(metadata.mtime(), metadata.mtime_nsec()),
            target: target.map_or_else(String::new, |target| target.to_string_lossy().into_owned()),
            uid: metadata.uid(),
            gid: metadata.gid(),
            changed_ms: ms(metadata.ctime(), metadata.ctime_nsec()),
        });
        if entries.len() == limits::ENTRIES_PER_FRAME {
            let directory = Directory { entries: std::mem::take(&mut entries), last: false };
            if !put(Body::Directory(directory), false) {
                return Ok(());
            }
        }
    }
    put(Body::Directory(Directory { entries, last: true }), true);
    Ok(())
}

fn absolute(path: &str) -> Result<(), Refusal> {
    if Path::new(path).is_absolute() {
        Ok(())
    } else {
        Err(Refusal::invalid(format!("{path:?} is not absolute")))
    }
}
