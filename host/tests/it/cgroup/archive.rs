//! The archive that a kernel unpacks as its first root: one program, a console to print on, and an end.

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// An archive whose `/init` is this program.
pub(crate) fn with_init(program: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    member(&mut archive, "dev", FOLDER, (0, 0), &[]);
    // Without it the first program has nowhere to print.
    member(&mut archive, "dev/console", CHARACTER_DEVICE, (5, 1), &[]);
    member(&mut archive, "init", PROGRAM, (0, 0), program);
    member(&mut archive, "TRAILER!!!", 0, (0, 0), &[]);
    archive
}

fn member(archive: &mut Vec<u8>, name: &str, mode: u32, device: (u32, u32), content: &[u8]) {
    let size = u32::try_from(content.len()).unwrap();
    let name_size = u32::try_from(name.len() + 1).unwrap();
    let inode = u32::try_from(archive.len()).unwrap() + 1;
    let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, device.0, device.1, name_size, 0];
    archive.extend(b"070701");
    for field in fields {
        archive.extend(format!("{field:08X}").bytes());
    }
    archive.extend(name.bytes().chain([0]));
    pad(archive);
    archive.extend(content);
    pad(archive);
}

fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}
