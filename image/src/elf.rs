//! Parses as much of the ELF format as it takes to recognise a kernel and read a module's `.modinfo`.
//!
//! Every offset comes from the file and is checked: a truncated or hostile file gives `None`, never a panic.

const HEADER_BYTES: usize = 64;
const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u16 = 62;
const SEGMENT_LOAD: u32 = 1;
const SEGMENT_INTERPRETER: u32 = 3;
const SEGMENT_NOTE: u32 = 4;

/// A 64-bit little-endian x86 ELF file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Elf<'a> {
    bytes: &'a [u8],
}

#[derive(Debug, Clone, Copy)]
struct Segment {
    kind: u32,
    offset: usize,
    size: usize,
    align: usize,
}

impl<'a> Elf<'a> {
    /// `None` when these bytes are something else.
    pub(super) fn parse(bytes: &'a [u8]) -> Option<Self> {
        let right_kind = bytes.len() >= HEADER_BYTES
            && bytes.starts_with(b"\x7fELF")
            && bytes[4] == CLASS_64
            && bytes[5] == LITTLE_ENDIAN;
        let elf = Self { bytes };
        (right_kind && elf.u16_at(18)? == MACHINE_X86_64).then_some(elf)
    }

    /// Whether everything that would be loaded is there, and there is something to load.
    pub(super) fn is_whole(&self) -> bool {
        let Some(segments) = self.segments() else { return false };
        let mut loads = segments.iter().filter(|segment| segment.kind == SEGMENT_LOAD).peekable();
        loads.peek().is_some() && loads.all(|segment| self.slice(segment.offset, segment.size).is_some())
    }

    /// Whether it can only be run by another program, the dynamic linker.
    pub(super) fn needs_interpreter(&self) -> bool {
        self.segments().unwrap_or_default().iter().any(|segment| segment.kind == SEGMENT_INTERPRETER)
    }

    /// Whether a note of this owner and type is there.
    pub(super) fn has_note(&self, owner: &[u8], kind: u32) -> bool {
        let segments = self.segments().unwrap_or_default();
        let notes = segments.iter().filter(|segment| segment.kind == SEGMENT_NOTE);
        notes.filter_map(|s| Some((self.slice(s.offset, s.size)?, s.align))).any(|(notes, align)| {
            Notes { rest: notes, align: align.max(4) }.any(|note| note == (owner, kind))
        })
    }

    /// The content of the first section of this name.
    pub(super) fn section(&self, name: &[u8]) -> Option<&'a [u8]> {
        let (table, entry, count) = (self.size_at(40)?, self.u16_at(58)?, self.u16_at(60)?);
        let header = |index: u16| table.checked_add(usize::from(index) * usize::from(entry));
        let content =
            |at: usize| self.slice(self.size_at(at.checked_add(24)?)?, self.size_at(at.checked_add(32)?)?);
        let names = content(header(self.u16_at(62)?)?)?;
        (0..count).filter_map(header).find_map(|at| {
            let start = usize::try_from(self.u32_at(at)?).ok()?;
            let found = names.get(start..)?.split(|&b| b == 0).next()?;
            if found == name { content(at) } else { None }
        })
    }

    fn segments(&self) -> Option<Vec<Segment>> {
        let (table, entry, count) = (self.size_at(32)?, usize::from(self.u16_at(54)?), self.u16_at(56)?);
        let segment = |index: usize| {
            let at = table.checked_add(index * entry)?;
            Some(Segment {
                kind: self.u32_at(at)?,
                offset: self.size_at(at.checked_add(8)?)?,
                size: self.size_at(at.checked_add(32)?)?,
                align: self.size_at(at.checked_add(48)?)?,
            })
        };
        (0..usize::from(count)).map(segment).collect()
    }

    fn slice(&self, at: usize, length: usize) -> Option<&'a [u8]> {
        self.bytes.get(at..at.checked_add(length)?)
    }

    fn u16_at(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes(self.slice(at, 2)?.try_into().ok()?))
    }

    fn u32_at(&self, at: usize) -> Option<u32> {
        Some(u32::from_le_bytes(self.slice(at, 4)?.try_into().ok()?))
    }

    fn size_at(&self, at: usize) -> Option<usize> {
        usize::try_from(u64::from_le_bytes(self.slice(at, 8)?.try_into().ok()?)).ok()
    }
}

/// The notes of one segment, as owner and type.
struct Notes<'a> {
    rest: &'a [u8],
    align: usize,
}

impl<'a> Iterator for Notes<'a> {
    type Item = (&'a [u8], u32);

    fn next(&mut self) -> Option<Self::Item> {
        let word = |at: usize| Some(u32::from_le_bytes(self.rest.get(at..at + 4)?.try_into().ok()?));
        let (owner_size, content_size) = (usize::try_from(word(0)?).ok()?, usize::try_from(word(4)?).ok()?);
        let kind = word(8)?;
        let owner = self.rest.get(12..12_usize.checked_add(owner_size)?)?;
        let content_at = 12_usize.checked_add(owner_size)?.checked_next_multiple_of(4)?;
        let end = content_at.checked_add(content_size)?.checked_next_multiple_of(self.align.min(8))?;
        self.rest = self.rest.get(end..).unwrap_or(&[]);
        Some((owner, kind))
    }
}
