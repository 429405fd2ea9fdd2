//! A batch of changes: the kernel carries out all of it or nothing.

use std::ffi::CString;

use nftnl::expr::Verdict as NftVerdict;
use nftnl::{Batch, ChainType, FinalizedBatch, MsgType, Policy, ProtoFamily};
use nftnl_sys::{self as sys, libc};

use super::ruleset::{
    BaseKind, Chain, Element, Expr, Family, Hook, LookupKind, NUMBER_TYPE, Placed, Set, SetKind, TABLE,
    Verdict,
};
use super::sys::{Field, RawExpression, RawMessage};
use super::wire::{Writer, attribute};

/// A message holds elements up to about this many bytes; its list's length is a 16-bit number.
const ELEMENTS_BYTES: usize = 48 * 1024;
/// Data of this type are verdicts.
pub(super) const DATA_VERDICT_TYPE: u32 = 0xffff_ff00;
pub(super) const RANGES_FLAGS: u32 = (libc::NFT_SET_INTERVAL | libc::NFT_SET_CONSTANT) as u32;
pub(super) const MAP_FLAGS: u32 = libc::NFT_SET_MAP as u32;
/// Room for a verdict in a map, as the kernel wants it said.
const VERDICT_BYTES: u32 = 16;
pub(super) const OBJECT_COUNTER: u32 = 1;
const USERDATA_KEY_ORDER: u8 = 0;
const USERDATA_DATA_ORDER: u8 = 1;
const HOST_ORDER: u32 = 1;
const NETWORK_ORDER: u32 = 2;

impl Family {
    pub(super) fn number(self) -> ProtoFamily {
        match self {
            Self::Inet => ProtoFamily::Inet,
            Self::Bridge => ProtoFamily::Bridge,
            Self::Arp => ProtoFamily::Arp,
        }
    }
}

pub(super) struct Changes {
    batch: Batch,
    /// Sets of one batch are told apart by number.
    sets: u32,
    empty: bool,
}

impl Changes {
    pub(super) fn new() -> Self {
        Self { batch: Batch::new(), sets: 0, empty: true }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.empty
    }

    pub(super) fn finish(self) -> FinalizedBatch {
        self.batch.finalize()
    }

    pub(super) fn add_table(&mut self, family: Family) {
        self.empty = false;
        self.batch.add(&table(family), MsgType::Add);
    }

    pub(super) fn delete_table(&mut self, family: Family) {
        self.empty = false;
        self.batch.add(&table(family), MsgType::Del);
    }

    /// Of all chains.
    pub(super) fn delete_rules(&mut self, family: Family) {
        let attributes = Writer::default().text(attribute::RULE_TABLE, TABLE);
        self.send(libc::NFT_MSG_DELRULE, family, 0, attributes);
    }

    pub(super) fn delete_chain(&mut self, family: Family, name: &str) {
        let attributes =
            Writer::default().text(attribute::CHAIN_TABLE, TABLE).text(attribute::CHAIN_NAME, name);
        self.send(libc::NFT_MSG_DELCHAIN, family, 0, attributes);
    }

    /// Without its rules. One that is there gets our policy.
    pub(super) fn add_chain(&mut self, family: Family, chain: &Chain) {
        self.empty = false;
        let table = table(family);
        let mut message = nftnl::Chain::new(c_text(&chain.name), &table);
        if let Some(base) = &chain.base {
            message.set_hook(
                match base.hook {
                    Hook::Prerouting => nftnl::Hook::PreRouting,
                    Hook::Input => nftnl::Hook::In,
                    Hook::Forward => nftnl::Hook::Forward,
                    Hook::Output => nftnl::Hook::Out,
                    Hook::Postrouting => nftnl::Hook::PostRouting,
                },
                base.priority,
            );
            message.set_type(match base.kind {
                BaseKind::Filter => ChainType::Filter,
                BaseKind::Nat => ChainType::Nat,
            });
            message.set_policy(if base.accepts { Policy::Accept } else { Policy::Drop });
        }
        self.batch.add(&message, MsgType::Add);
    }

    pub(super) fn add_rules(&mut self, family: Family, chain: &Chain) {
        self.empty = false;
        let table = table(family);
        let in_chain = nftnl::Chain::new(c_text(&chain.name), &table);
        for expressions in &chain.rules {
            let mut rule = nftnl::Rule::new(&in_chain);
            for expression in expressions {
                add_expression(&mut rule, expression);
            }
            self.batch.add(&rule, MsgType::Add);
        }
    }

    pub(super) fn delete_set(&mut self, family: Family, name: &str) {
        let attributes = Writer::default().text(attribute::SET_TABLE, TABLE).text(attribute::SET_NAME, name);
        self.send(libc::NFT_MSG_DELSET, family, 0, attributes);
    }

    pub(super) fn add_set(&mut self, family: Family, set: &Set) {
        self.sets += 1;
        let flags = match set.kind {
            SetKind::Plain => 0,
            SetKind::Ranges => RANGES_FLAGS,
            SetKind::Verdicts | SetKind::Numbers => MAP_FLAGS,
            SetKind::Foreign(flags) => flags,
        };
        let mut attributes = Writer::default()
            .text(attribute::SET_TABLE, TABLE)
            .text(attribute::SET_NAME, &set.name)
            .u32(attribute::SET_FLAGS, flags)
            .u32(attribute::SET_KEY_TYPE, set.key_type)
            .u32(attribute::SET_KEY_LEN, set.key_bytes)
            .u32(attribute::SET_ID, self.sets);
        // For `nft` alone, which could not show some keys without: in what order their bytes are.
        let order = if set.kind == SetKind::Ranges { NETWORK_ORDER } else { HOST_ORDER };
        let about = |number: u8, order: u32| [&[number, 4][..], &order.to_ne_bytes()[..]].concat();
        let mut orders = about(USERDATA_KEY_ORDER, order);
        if set.kind == SetKind::Numbers {
            orders.extend(about(USERDATA_DATA_ORDER, HOST_ORDER));
        }
        attributes = attributes.bytes(attribute::SET_USERDATA, &orders);
        if set.kind == SetKind::Verdicts {
            attributes = attributes
                .u32(attribute::SET_DATA_TYPE, DATA_VERDICT_TYPE)
                .u32(attribute::SET_DATA_LEN, VERDICT_BYTES);
        }
        if set.kind == SetKind::Numbers {
            attributes = attributes
                .u32(attribute::SET_DATA_TYPE, NUMBER_TYPE)
                .u32(attribute::SET_DATA_LEN, size_of::<u32>() as u32);
        }
        if set.counted {
            let counter = Writer::default()
                .text(attribute::EXPR_NAME, "counter")
                .nest(attribute::EXPR_DATA, &Writer::default());
            attributes = attributes.nest(attribute::SET_EXPR, &counter);
        }
        self.send(libc::NFT_MSG_NEWSET, family, libc::NLM_F_CREATE, attributes);
    }

    pub(super) fn delete_counter(&mut self, family: Family, name: &str, kind: u32) {
        let attributes = object(name, kind);
        self.send(libc::NFT_MSG_DELOBJ, family, 0, attributes);
    }

    pub(super) fn add_counter(&mut self, family: Family, name: &str) {
        let attributes = object(name, OBJECT_COUNTER).nest(attribute::OBJECT_DATA, &Writer::default());
        self.send(libc::NFT_MSG_NEWOBJ, family, libc::NLM_F_CREATE, attributes);
    }

    /// Those that are there already stay, with what they counted.
    pub(super) fn add_elements<'a>(&mut self, elements: impl IntoIterator<Item = &'a Placed>) {
        self.elements(libc::NFT_MSG_NEWSETELEM, libc::NLM_F_CREATE, elements);
    }

    /// They must be there.
    pub(super) fn delete_elements<'a>(&mut self, elements: impl IntoIterator<Item = &'a Placed>) {
        self.elements(libc::NFT_MSG_DELSETELEM, 0, elements);
    }

    /// Of one set, whose name need not be one of ours.
    pub(super) fn delete_elements_of<'a>(
        &mut self,
        (family, set): (Family, &str),
        elements: impl IntoIterator<Item = &'a Element>,
    ) {
        let mut elements = elements.into_iter().peekable();
        while elements.peek().is_some() {
            self.some_elements(libc::NFT_MSG_DELSETELEM, 0, (family, set), &mut || elements.next());
        }
    }

    fn elements<'a>(&mut self, message: i32, flags: i32, elements: impl IntoIterator<Item = &'a Placed>) {
        let mut elements = elements.into_iter().peekable();
        while let Some(first) = elements.peek() {
            let place = (first.family, first.set);
            let mut of_place = || Some(&elements.next_if(|next| (next.family, next.set) == place)?.element);
            self.some_elements(message, flags, place, &mut of_place);
        }
    }

    /// As many as one message holds.
    fn some_elements<'a>(
        &mut self,
        message: i32,
        flags: i32,
        (family, set): (Family, &str),
        next: &mut dyn FnMut() -> Option<&'a Element>,
    ) {
        let mut list = Writer::default();
        while list.as_bytes().len() < ELEMENTS_BYTES
            && let Some(element) = next()
        {
            list = with_element(list, element);
        }
        let attributes = Writer::default()
            .text(attribute::ELEMENTS_TABLE, TABLE)
            .text(attribute::ELEMENTS_SET, set)
            .nest(attribute::ELEMENTS_LIST, &list);
        self.send(message, family, flags, attributes);
    }

    fn send(&mut self, message: i32, family: Family, flags: i32, attributes: Writer) {
        self.empty = false;
        // Only lists of elements are long, and those are split; one that did not fit would leave a set incomplete,
        // which is closed, and found by the next inspection.
        if let Some(message) = RawMessage::new(message, family.number(), flags, attributes) {
            self.batch.add(&message, MsgType::Add);
        }
    }
}

fn table(family: Family) -> nftnl::Table {
    nftnl::Table::new(c_text(TABLE), family.number())
}

fn object(name: &str, kind: u32) -> Writer {
    Writer::default()
        .text(attribute::OBJECT_TABLE, TABLE)
        .text(attribute::OBJECT_NAME, name)
        .u32(attribute::OBJECT_TYPE, kind)
}

fn with_element(list: Writer, element: &Element) -> Writer {
    let key = Writer::default().bytes(attribute::DATA_VALUE, &element.key);
    let mut attributes = Writer::default().nest(attribute::ELEMENT_KEY, &key);
    if element.end {
        attributes = attributes.u32(attribute::ELEMENT_FLAGS, libc::NFT_SET_ELEM_INTERVAL_END as u32);
    }
    if let Some(verdict) = &element.verdict {
        let (code, chain) = match verdict {
            Verdict::Accept => (libc::NF_ACCEPT, None),
            Verdict::Drop => (libc::NF_DROP, None),
            Verdict::Goto(chain) => (libc::NFT_GOTO, Some(chain)),
            Verdict::Foreign(code) => (*code, None),
        };
        let mut inner = Writer::default().u32(attribute::VERDICT_CODE, code as u32);
        if let Some(chain) = chain {
            inner = inner.text(attribute::VERDICT_CHAIN, chain);
        }
        let data = Writer::default().nest(attribute::DATA_VERDICT, &inner);
        attributes = attributes.nest(attribute::ELEMENT_DATA, &data);
    }
    if let Some(number) = element.number {
        let data = Writer::default().bytes(attribute::DATA_VALUE, &number.to_ne_bytes());
        attributes = attributes.nest(attribute::ELEMENT_DATA, &data);
    }
    list.nest(attribute::LIST_ELEMENT, &attributes)
}

fn add_expression(rule: &mut nftnl::Rule<'_>, expression: &Expr) {
    let number = |field: u32, value: u32| (field, Field::Number(value));
    let (name, fields) = match expression {
        Expr::Meta { key, register } => (
            c"meta",
            vec![number(sys::NFTNL_EXPR_META_KEY, *key), number(sys::NFTNL_EXPR_META_DREG, *register)],
        ),
        Expr::SetMeta { key, register } => (
            c"meta",
            vec![number(sys::NFTNL_EXPR_META_KEY, *key), number(sys::NFTNL_EXPR_META_SREG, *register)],
        ),
        Expr::Immediate { register, data } => (
            c"immediate",
            vec![
                number(sys::NFTNL_EXPR_IMM_DREG, *register),
                (sys::NFTNL_EXPR_IMM_DATA, Field::Data(data.clone())),
            ],
        ),
        Expr::Payload { base, offset, bytes, register } => (
            c"payload",
            vec![
                number(sys::NFTNL_EXPR_PAYLOAD_DREG, *register),
                number(sys::NFTNL_EXPR_PAYLOAD_BASE, *base),
                number(sys::NFTNL_EXPR_PAYLOAD_OFFSET, *offset),
                number(sys::NFTNL_EXPR_PAYLOAD_LEN, *bytes),
            ],
        ),
        Expr::Ct { key, register } => {
            (c"ct", vec![number(sys::NFTNL_EXPR_CT_KEY, *key), number(sys::NFTNL_EXPR_CT_DREG, *register)])
        }
        Expr::And { register, mask } => (
            c"bitwise",
            vec![
                number(sys::NFTNL_EXPR_BITWISE_SREG, *register),
                number(sys::NFTNL_EXPR_BITWISE_DREG, *register),
                number(sys::NFTNL_EXPR_BITWISE_LEN, mask.len() as u32),
                (sys::NFTNL_EXPR_BITWISE_MASK, Field::Data(mask.clone())),
                (sys::NFTNL_EXPR_BITWISE_XOR, Field::Data(vec![0; mask.len()])),
            ],
        ),
        Expr::Compare { register, operator, data } => (
            c"cmp",
            vec![
                number(sys::NFTNL_EXPR_CMP_SREG, *register),
                number(sys::NFTNL_EXPR_CMP_OP, *operator),
                (sys::NFTNL_EXPR_CMP_DATA, Field::Data(data.clone())),
            ],
        ),
        Expr::Lookup { register, set, kind } => {
            let mut fields = vec![
                number(sys::NFTNL_EXPR_LOOKUP_SREG, *register),
                (sys::NFTNL_EXPR_LOOKUP_SET, Field::Text(c_text(set))),
            ];
            fields.extend(match kind {
                LookupKind::In => None,
                LookupKind::NotIn => {
                    Some(number(sys::NFTNL_EXPR_LOOKUP_FLAGS, libc::NFT_LOOKUP_F_INV as u32))
                }
                LookupKind::Verdict => {
                    Some(number(sys::NFTNL_EXPR_LOOKUP_DREG, libc::NFT_REG_VERDICT as u32))
                }
                LookupKind::Number => Some(number(sys::NFTNL_EXPR_LOOKUP_DREG, libc::NFT_REG_1 as u32)),
            });
            (c"lookup", fields)
        }
        Expr::Count(counter) => (
            c"objref",
            vec![
                number(sys::NFTNL_EXPR_OBJREF_IMM_TYPE, OBJECT_COUNTER),
                (sys::NFTNL_EXPR_OBJREF_IMM_NAME, Field::Text(c_text(counter))),
            ],
        ),
        Expr::Verdict(verdict) => {
            rule.add_expr(&match verdict {
                Verdict::Accept => NftVerdict::Accept,
                Verdict::Goto(chain) => NftVerdict::Goto { chain: c_text(chain) },
                // What we did not make is never sent; if it were, it would open nothing.
                Verdict::Drop | Verdict::Foreign(_) => NftVerdict::Drop,
            });
            return;
        }
        Expr::Masquerade => return rule.add_expr(&nftnl::expr::Masquerade),
        Expr::Foreign(_) => return rule.add_expr(&NftVerdict::Drop),
    };
    rule.add_expr(&RawExpression { name, fields });
}

/// Names of ours have no zero in them.
fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}
