//! A rule set as data: tables of chains, sets and counters, and rules as the kernel's own small steps.
//!
//! Both sides of every comparison are made of these values: what should be ([`super::inet`], [`super::bridge`]) and
//! what the kernel says there is ([`super::dump`]). Numbers are the kernel's.

use nftnl_sys::libc;

/// All of our tables have this name, each in its own family.
pub(super) const TABLE: &str = "mvm";

/// How `nft` shows priorities.
pub(super) const NUMBER_TYPE: u32 = 23;

/// Interface names as the kernel keeps them in a register: padded with zeros.
pub(super) const NAME_BYTES: u32 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Family {
    Inet,
    Bridge,
    Arp,
}

impl Family {
    pub(super) const ALL: [Self; 3] = [Self::Inet, Self::Bridge, Self::Arp];
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Table {
    pub(super) family: Family,
    pub(super) chains: Vec<Chain>,
    pub(super) sets: Vec<Set>,
    pub(super) counters: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chain {
    pub(super) name: String,
    pub(super) base: Option<Base>,
    pub(super) rules: Vec<Rule>,
}

/// Where a chain meets packets by itself. One without it is only ever gone to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Base {
    pub(super) kind: BaseKind,
    pub(super) hook: Hook,
    pub(super) priority: i32,
    /// False for any policy but accept: our base chains have nothing to say about traffic of others.
    pub(super) accepts: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BaseKind {
    Filter,
    Nat,
}

/// The family of ARP has but one that we use, which is its `input` and numbered like the others' `prerouting`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hook {
    Prerouting,
    Input,
    Forward,
    Output,
    Postrouting,
}

/// Steps that run one after the other; the first that does not hold ends the rule.
pub(super) type Rule = Vec<Expr>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Expr {
    Meta {
        key: u32,
        register: u32,
    },
    SetMeta {
        key: u32,
        register: u32,
    },
    Immediate {
        register: u32,
        data: Vec<u8>,
    },
    Payload {
        base: u32,
        offset: u32,
        bytes: u32,
        register: u32,
    },
    Ct {
        key: u32,
        register: u32,
    },
    And {
        register: u32,
        mask: Vec<u8>,
    },
    Compare {
        register: u32,
        operator: u32,
        data: Vec<u8>,
    },
    Lookup {
        register: u32,
        set: String,
        kind: LookupKind,
    },
    Count(String),
    Verdict(Verdict),
    Masquerade,
    /// One that we never make.
    Foreign(String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LookupKind {
    In,
    NotIn,
    /// The element's own verdict is carried out.
    Verdict,
    /// The element's number goes into the first register.
    Number,
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Verdict {
    Accept,
    Drop,
    Goto(String),
    Foreign(i32),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Set {
    pub(super) name: String,
    /// How the key is shown: what types it is put together of.
    pub(super) key_type: u32,
    pub(super) key_bytes: u32,
    pub(super) kind: SetKind,
    /// Elements count what meets them.
    pub(super) counted: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SetKind {
    Plain,
    /// Ranges that never change.
    Ranges,
    /// From a key to a verdict.
    Verdicts,
    /// From a key to a number.
    Numbers,
    Foreign(u32),
}

/// What is in a set. Of a range, one element for its first address and one for the first after it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Element {
    pub(super) key: Vec<u8>,
    pub(super) end: bool,
    pub(super) verdict: Option<Verdict>,
    pub(super) number: Option<u32>,
}

/// An element and where it belongs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Placed {
    pub(super) family: Family,
    pub(super) set: &'static str,
    pub(super) element: Element,
}

/// Types of keys, as `nft` names them.
#[derive(Debug, Clone, Copy)]
pub(super) enum KeyType {
    Interface,
    Mac,
    Address,
    Protocol,
    Port,
    /// A number of our own, in the machine's order, that a frame has for its priority.
    Number,
}

impl KeyType {
    fn number(self) -> u32 {
        match self {
            Self::Address => 7,
            Self::Mac => 9,
            Self::Protocol => 12,
            Self::Port => 13,
            Self::Number => NUMBER_TYPE,
            Self::Interface => 41,
        }
    }

    /// In a key, where everything fills whole registers.
    fn bytes(self) -> u32 {
        match self {
            Self::Interface => NAME_BYTES,
            Self::Mac => 8,
            Self::Address | Self::Protocol | Self::Port | Self::Number => 4,
        }
    }
}

impl Set {
    pub(super) fn new(name: &str, key: &[KeyType]) -> Self {
        Self {
            name: name.to_owned(),
            key_type: key.iter().fold(0, |types, part| types << 6 | part.number()),
            key_bytes: key.iter().map(|part| part.bytes()).sum(),
            kind: SetKind::Plain,
            counted: false,
        }
    }

    pub(super) fn counted(self) -> Self {
        Self { counted: true, ..self }
    }

    pub(super) fn of(self, kind: SetKind) -> Self {
        Self { kind, ..self }
    }
}

impl Chain {
    pub(super) fn new(name: &str, rules: Vec<Rule>) -> Self {
        Self { name: name.to_owned(), base: None, rules }
    }

    pub(super) fn base(name: &str, kind: BaseKind, hook: Hook, priority: i32, rules: Vec<Rule>) -> Self {
        let base = Some(Base { kind, hook, priority, accepts: true });
        Self { name: name.to_owned(), base, rules }
    }
}

/// The register at this offset of the key, by the name that the kernel itself uses for it.
pub(super) fn register_at(bytes: u32) -> u32 {
    if bytes.is_multiple_of(16) { 1 + bytes / 16 } else { libc::NFT_REG32_00 as u32 + bytes / 4 }
}

/// A rule from its parts: each is one or more steps.
pub(super) fn rule<const N: usize>(parts: [Vec<Expr>; N]) -> Rule {
    parts.into_iter().flatten().collect()
}

pub(super) fn verdict(verdict: Verdict) -> Vec<Expr> {
    vec![Expr::Verdict(verdict)]
}

pub(super) fn accept() -> Vec<Expr> {
    verdict(Verdict::Accept)
}

pub(super) fn goto(chain: &str) -> Vec<Expr> {
    verdict(Verdict::Goto(chain.to_owned()))
}

pub(super) fn equals(load: fn(u32) -> Expr, data: &[u8]) -> Vec<Expr> {
    compared(load, libc::NFT_CMP_EQ, data)
}

pub(super) fn differs(load: fn(u32) -> Expr, data: &[u8]) -> Vec<Expr> {
    compared(load, libc::NFT_CMP_NEQ, data)
}

fn compared(load: fn(u32) -> Expr, operator: i32, data: &[u8]) -> Vec<Expr> {
    vec![load(1), compare(operator, data)]
}

/// With what the first register holds.
pub(super) fn compare(operator: i32, data: &[u8]) -> Expr {
    Expr::Compare { register: 1, operator: operator as u32, data: data.to_vec() }
}

/// Looks up a key that is put together of all of these.
pub(super) fn lookup(parts: &[Part], set: &str, kind: LookupKind) -> Vec<Expr> {
    let mut steps = Vec::new();
    let mut offset = 0;
    for part in parts {
        steps.push((part.load)(register_at(offset)));
        offset += part.key_type.bytes();
    }
    steps.push(Expr::Lookup { register: 1, set: set.to_owned(), kind });
    steps
}

/// Something that can be read from a packet and be part of a key.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub(super) key_type: KeyType,
    pub(super) load: fn(u32) -> Expr,
}

/// A key's bytes.
#[derive(Debug, Default)]
pub(super) struct Key(Vec<u8>);

impl Key {
    pub(super) fn interface(mut self, name: &str) -> Self {
        let start = self.0.len();
        self.0.extend(name.bytes().take(NAME_BYTES as usize - 1));
        self.0.resize(start + NAME_BYTES as usize, 0);
        self
    }

    pub(super) fn mac(mut self, mac: [u8; 6]) -> Self {
        self.0.extend(mac);
        self.0.extend([0, 0]);
        self
    }

    pub(super) fn address(mut self, address: std::net::Ipv4Addr) -> Self {
        self.0.extend(address.octets());
        self
    }

    pub(super) fn protocol(mut self, protocol: u8) -> Self {
        self.0.extend([protocol, 0, 0, 0]);
        self
    }

    pub(super) fn port(mut self, port: u16) -> Self {
        self.0.extend(port.to_be_bytes());
        self.0.extend([0, 0]);
        self
    }

    pub(super) fn number(mut self, number: u32) -> Self {
        self.0.extend(number.to_ne_bytes());
        self
    }

    pub(super) fn element(self) -> Element {
        Element { key: self.0, end: false, verdict: None, number: None }
    }

    pub(super) fn numbered(self, number: u32) -> Element {
        Element { number: Some(number), ..self.element() }
    }

    pub(super) fn to(self, verdict: Verdict) -> Element {
        Element { verdict: Some(verdict), ..self.element() }
    }
}
