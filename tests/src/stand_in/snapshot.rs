//! A snapshot's two files: the state, with a version and a checksum as the real one; the memory, which is the guest's
//! folder, packed, in a file as long as the guest's memory.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::Value;

use super::arguments::SNAPSHOT_VERSION;

const MAGIC: &[u8; 8] = b"STANDIN1";

/// Writes the state with its checksum last.
pub fn write_state(path: &str, state: &Value) -> io::Result<()> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(format!("{SNAPSHOT_VERSION}\n{state}").as_bytes());
    bytes.extend_from_slice(&crc32fast::hash(&bytes).to_be_bytes());
    fs::write(path, bytes)
}

pub fn read_state(path: &str) -> Result<Value, String> {
    let bytes = fs::read(path).map_err(|cause| format!("Failed to open snapshot file: {cause}"))?;
    let Some((body, sum)) = bytes.split_last_chunk::<4>() else {
        return Err("Failed to load snapshot: the file is too short".to_owned());
    };
    if crc32fast::hash(body).to_be_bytes() != *sum {
        return Err("Failed to load snapshot: CRC validation failed".to_owned());
    }
    let text = body.strip_prefix(MAGIC).and_then(|text| std::str::from_utf8(text).ok());
    let (version, json) =
        text.and_then(|text| text.split_once('\n')).ok_or("Failed to load snapshot: no header")?;
    if version != SNAPSHOT_VERSION {
        return Err(format!("Failed to load snapshot: Unsupported snapshot version {version}"));
    }
    serde_json::from_str(json).map_err(|error| format!("Failed to load snapshot: {error}"))
}

/// Packs a folder into a sparse file of this length. Without content it is what a snapshot of no differences is.
pub fn write_memory(path: &str, folder: &Path, bytes: u64, full: bool) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.set_len(bytes)?;
    if !full {
        return Ok(());
    }
    let mut packed = Vec::new();
    pack(folder, "", &mut packed)?;
    file.write_all(&(packed.len() as u64).to_be_bytes())?;
    file.write_all(&packed)
}

/// Unpacks a memory file. Content that makes no sense is no error: memory is what it is.
pub fn read_memory(path: &str, folder: &Path, bytes: u64) -> Result<(), String> {
    let mut file = File::open(path).map_err(|cause| format!("Failed to open the memory file: {cause}"))?;
    let found = file.metadata().map_err(|cause| cause.to_string())?.len();
    if found < bytes {
        return Err(format!("The memory file has {found} bytes, the guest's memory {bytes}"));
    }
    let mut length = [0; 8];
    let mut packed = Vec::new();
    let read = file
        .seek(SeekFrom::Start(0))
        .and_then(|_| file.read_exact(&mut length))
        .and_then(|()| (&mut file).take(u64::from_be_bytes(length).min(found)).read_to_end(&mut packed));
    read.map_err(|cause| cause.to_string())?;
    unpack(&packed, folder).map_err(|cause| cause.to_string())
}

fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_be_bytes());
    out.extend_from_slice(bytes);
}

fn pack(folder: &Path, prefix: &str, out: &mut Vec<u8>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let (kind, name) = (entry.file_type()?, format!("{prefix}{}", entry.file_name().to_string_lossy()));
        if kind.is_dir() {
            put(out, format!("{name}/").as_bytes());
            put(out, b"");
            put(out, b"");
            pack(&entry.path(), &format!("{name}/"), out)?;
        } else if kind.is_file() {
            put(out, name.as_bytes());
            put(out, &entry.metadata()?.permissions().mode().to_be_bytes());
            put(out, &fs::read(entry.path())?);
        }
    }
    Ok(())
}

fn take<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let (length, after) = rest.split_first_chunk::<8>()?;
    let length = usize::try_from(u64::from_be_bytes(*length)).ok()?;
    let taken = after.get(..length)?;
    *rest = &after[length..];
    Some(taken)
}

fn unpack(mut packed: &[u8], folder: &Path) -> io::Result<()> {
    while let (Some(name), Some(mode), Some(content)) =
        (take(&mut packed), take(&mut packed), take(&mut packed))
    {
        let path = folder.join(String::from_utf8_lossy(name).as_ref());
        if name.ends_with(b"/") {
            fs::create_dir_all(&path)?;
            continue;
        }
        fs::write(&path, content)?;
        if let Ok(mode) = mode.try_into() {
            fs::set_permissions(&path, fs::Permissions::from_mode(u32::from_be_bytes(mode)))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_comes_back_from_memory_as_it_was() {
        let dir = tempfile::tempdir().expect("a folder");
        let (before, after) = (dir.path().join("before"), dir.path().join("after"));
        fs::create_dir_all(before.join("run/deep")).expect("made");
        fs::create_dir_all(&after).expect("made");
        fs::write(before.join("run/deep/file"), b"kept").expect("written");
        let memory = dir.path().join("mem").display().to_string();
        write_memory(&memory, &before, 1 << 20, true).expect("packed");
        assert_eq!(fs::metadata(&memory).expect("there").len(), 1 << 20);
        read_memory(&memory, &after, 1 << 20).expect("unpacked");
        assert_eq!(fs::read(after.join("run/deep/file")).expect("there"), b"kept");
        assert!(read_memory(&memory, &after, 1 << 21).is_err(), "it is too short");
    }

    #[test]
    fn a_state_that_was_touched_is_refused() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("state").display().to_string();
        let state = serde_json::json!({"a": 1});
        write_state(&path, &state).expect("written");
        assert_eq!(read_state(&path), Ok(state));
        let mut bytes = fs::read(&path).expect("there");
        bytes[12] ^= 1;
        fs::write(&path, &bytes).expect("written");
        assert!(read_state(&path).expect_err("refused").contains("CRC"));
        fs::write(&path, b"ab").expect("written");
        assert!(read_state(&path).is_err());
    }
}
