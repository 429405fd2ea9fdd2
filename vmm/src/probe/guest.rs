//! The guest of the probe: an ELF file of 512 bytes that counts and then ends its VMM.

/// QEMU's debug exit device is put at this port, and ends QEMU with twice what is written there, plus one.
pub(super) const EXIT_PORT: &str = "0xf4";
const EXIT_VALUE: u8 = 0x20;
pub(super) const EXIT_CODE: i32 = 2 * EXIT_VALUE as i32 + 1;

/// Enough that emulation of each instruction by a hypervisor takes minutes, and a processor some 20 ms.
const COUNT: u32 = 50_000_000;

/// Where it is loaded: the first address above what firmware uses.
const BASE: u64 = 0x10_0000;
const NOTE_AT: u64 = 176;
const CODE_AT: u64 = 256;
const SIZE: u64 = 512;

/// The note that tells where a kernel begins in 32-bit mode without paging.
const PHYS32_ENTRY: u32 = 18;

pub(super) fn elf() -> Vec<u8> {
    let entry = BASE + CODE_AT;
    let mut file = Vec::with_capacity(SIZE as usize);
    // The header: 64-bit, little-endian, an x86-64 program with two segments right behind the header.
    file.extend(*b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    put16(&mut file, &[2, 62]);
    put32(&mut file, &[1]);
    put64(&mut file, &[entry, 64, 0]);
    put32(&mut file, &[0]);
    put16(&mut file, &[64, 56, 2, 0, 0, 0]);
    // All of it is loaded, readable, writable and executable; the note is a part of it.
    let note = note(entry);
    let note_bytes = note.len() as u64;
    put32(&mut file, &[1, 7]);
    put64(&mut file, &[0, BASE, BASE, SIZE, SIZE, 4096]);
    put32(&mut file, &[4, 4]);
    put64(&mut file, &[NOTE_AT, BASE + NOTE_AT, BASE + NOTE_AT, note_bytes, note_bytes, 4]);
    file.resize(NOTE_AT as usize, 0);
    file.extend(note);
    file.resize(CODE_AT as usize, 0);
    file.extend(code());
    file.resize(SIZE as usize, 0);
    file
}

fn note(entry: u64) -> Vec<u8> {
    let mut note = Vec::new();
    put32(&mut note, &[4, 8, PHYS32_ENTRY]);
    note.extend(*b"Xen\0");
    put64(&mut note, &[entry]);
    note
}

fn code() -> Vec<u8> {
    let mut code = vec![0xb9]; // mov ecx, COUNT
    put32(&mut code, &[COUNT]);
    code.extend([0x49, 0x75, 0xfd]); // dec ecx; jnz back to it
    code.extend([0xb0, EXIT_VALUE, 0xe6, 0xf4]); // mov al, EXIT_VALUE; out EXIT_PORT, al
    code.extend([0xf4, 0xeb, 0xfd]); // hlt; jmp back to it
    code
}

fn put16(file: &mut Vec<u8>, values: &[u16]) {
    file.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

fn put32(file: &mut Vec<u8>, values: &[u32]) {
    file.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

fn put64(file: &mut Vec<u8>, values: &[u64]) {
    file.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}
