//! Extracts from a kernel file what VMMs boot directly: the uncompressed ELF with a PVH entry.
//!
//! Distributions ship a `bzImage`: a loader with the packed ELF inside, where the boot protocol's header says it is.

use std::path::Path;

use super::ImageError;
use super::compression::Compression;
use super::elf::Elf;

/// `XEN_ELFNOTE_PHYS32_ENTRY`: where a VMM enters a kernel that it loaded itself.
const PVH_ENTRY: u32 = 18;
const PVH_OWNER: &[u8] = b"Xen\0";

/// Fields of the header of a `bzImage`, from its start.
const SETUP_SECTORS_AT: usize = 0x1f1;
const MAGIC_AT: usize = 0x202;
const VERSION_AT: usize = 0x206;
const PAYLOAD_OFFSET_AT: usize = 0x248;
const PAYLOAD_LENGTH_AT: usize = 0x24c;
/// The first version of the boot protocol that tells where the payload is.
const PAYLOAD_SINCE: u16 = 0x0208;
const SECTOR: usize = 512;
/// What the kernel's build adds to a payload that is not gzip: its unpacked size.
const SIZE_SUFFIX: usize = 4;

/// The ELF kernel in the content of `path`, whole and with an entry for VMMs.
pub(super) fn bootable(bytes: Vec<u8>, path: &Path) -> Result<Vec<u8>, ImageError> {
    let kernel = if is_bzimage(&bytes) { unpack(&bytes, path)? } else { bytes };
    check(&kernel, path)?;
    Ok(kernel)
}

fn check(kernel: &[u8], path: &Path) -> Result<(), ImageError> {
    let elf = Elf::parse(kernel).ok_or_else(|| {
        ImageError::invalid(path, "not a kernel: neither a bzImage nor a 64-bit x86 ELF file")
    })?;
    if !elf.is_whole() {
        return Err(ImageError::invalid(path, "truncated: the file ends before what it says is in it"));
    }
    if !elf.has_note(PVH_OWNER, PVH_ENTRY) {
        let fault = "not a kernel that a VMM can enter: it has no PVH note (is it Linux with CONFIG_PVH=y?)";
        return Err(ImageError::invalid(path, fault));
    }
    Ok(())
}

fn is_bzimage(bytes: &[u8]) -> bool {
    bytes.get(MAGIC_AT..MAGIC_AT + 4) == Some(b"HdrS")
}

fn unpack(bytes: &[u8], path: &Path) -> Result<Vec<u8>, ImageError> {
    let truncated = || ImageError::invalid(path, "truncated: the file ends before what it says is in it");
    let word = |at: usize| {
        let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let version = bytes.get(VERSION_AT..VERSION_AT + 2).ok_or_else(truncated)?;
    if u16::from_le_bytes([version[0], version[1]]) < PAYLOAD_SINCE {
        return Err(ImageError::invalid(
            path,
            "a bzImage too old to say where its kernel is (boot protocol before 2.08)",
        ));
    }
    let sectors = match bytes[SETUP_SECTORS_AT] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let (offset, length) =
        (word(PAYLOAD_OFFSET_AT).ok_or_else(truncated)?, word(PAYLOAD_LENGTH_AT).ok_or_else(truncated)?);
    let start = (sectors + 1) * SECTOR + offset;
    let payload = bytes.get(start..start.saturating_add(length)).ok_or_else(truncated)?;
    let Some(packing) = Compression::of(payload) else {
        let begin = payload.get(..4).map(mvm_proto::digest::hex).unwrap_or_default();
        let fault = format!(
            "packed in a way that is not known (it begins with {begin}); known are lz4, gzip, xz and zstd"
        );
        return Err(ImageError::invalid(path, fault));
    };
    let payload = match packing {
        Compression::Gzip => payload,
        _ => payload.get(..payload.len().saturating_sub(SIZE_SUFFIX)).unwrap_or(&[]),
    };
    packing.unpack(payload, path)
}
