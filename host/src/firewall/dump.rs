//! What the kernel says there is in our tables, as the same values of which the tables were made.

use std::collections::BTreeMap;

use nftnl_sys::libc;

use super::changes::{DATA_VERDICT_TYPE, MAP_FLAGS, OBJECT_COUNTER, RANGES_FLAGS};
use super::link::Link;
use super::ruleset::{
    Base, BaseKind, Chain, Element, Expr, Family, Hook, LookupKind, NUMBER_TYPE, Rule, Set, SetKind, TABLE,
    Verdict,
};
use super::wire::{Attributes, Reply, Writer, attribute};
use super::{FirewallError, Tally};

/// A table as it was found.
#[derive(Debug, Clone, Default)]
pub(super) struct Found {
    /// Zero, unless it was put to sleep or belongs to a process.
    pub(super) flags: u32,
    pub(super) chains: Vec<Chain>,
    pub(super) sets: Vec<FoundSet>,
    /// By kind and name.
    pub(super) objects: BTreeMap<(u32, String), Tally>,
}

#[derive(Debug, Clone)]
pub(super) struct FoundSet {
    pub(super) set: Set,
    /// What each counted, if it counts.
    pub(super) elements: BTreeMap<Element, Tally>,
}

/// Our table of a family, or nothing; false when it changed meanwhile.
pub(super) fn read(link: &Link, family: Family) -> Result<(Option<Found>, bool), FirewallError> {
    let number = family.number() as u8;
    let mut whole = true;
    let mut dump = |what: &str, message, attributes: &Writer, take: &mut dyn FnMut(&Attributes<'_>)| {
        let attempt = format!("list {what} of the {family:?} table");
        // Kernels before 5.x do not filter every listing themselves.
        let mut take = |reply: &Reply<'_>| {
            if reply.family() == number {
                take(&reply.attributes());
            }
        };
        whole &= link.dump(&attempt, message, number, attributes, &mut take)?;
        Ok::<_, FirewallError>(())
    };
    let mut found: Option<Found> = None;
    dump("the names", libc::NFT_MSG_GETTABLE, &Writer::default(), &mut |table| {
        if table.text(attribute::TABLE_NAME).as_deref() == Some(TABLE) {
            let flags = table.u32(attribute::TABLE_FLAGS).unwrap_or_default();
            found = Some(Found { flags, ..Found::default() });
        }
    })?;
    let Some(mut found) = found else { return Ok((None, whole)) };
    dump("the chains", libc::NFT_MSG_GETCHAIN, &Writer::default(), &mut |chain| {
        if chain.text(attribute::CHAIN_TABLE).as_deref() == Some(TABLE) {
            found.chains.push(chain_of(chain));
        }
    })?;
    let of_table = Writer::default().text(attribute::RULE_TABLE, TABLE);
    let mut rules: BTreeMap<String, Vec<Rule>> = BTreeMap::new();
    dump("the rules", libc::NFT_MSG_GETRULE, &of_table, &mut |rule| {
        if rule.text(attribute::RULE_TABLE).as_deref() == Some(TABLE) {
            let expressions = rule.entries(attribute::RULE_EXPRESSIONS).iter().map(expression_of).collect();
            rules.entry(rule.text(attribute::RULE_CHAIN).unwrap_or_default()).or_default().push(expressions);
        }
    })?;
    for chain in &mut found.chains {
        chain.rules = rules.remove(&chain.name).unwrap_or_default();
    }
    let of_table = Writer::default().text(attribute::SET_TABLE, TABLE);
    dump("the sets", libc::NFT_MSG_GETSET, &of_table, &mut |set| {
        if set.text(attribute::SET_TABLE).as_deref() == Some(TABLE) {
            found.sets.push(FoundSet { set: set_of(set), elements: BTreeMap::new() });
        }
    })?;
    for FoundSet { set, elements } in &mut found.sets {
        let of_set =
            Writer::default().text(attribute::ELEMENTS_TABLE, TABLE).text(attribute::ELEMENTS_SET, &set.name);
        dump(&format!("the set {}", set.name), libc::NFT_MSG_GETSETELEM, &of_set, &mut |part| {
            elements.extend(part.entries(attribute::ELEMENTS_LIST).iter().map(element_of));
        })?;
    }
    let of_table = Writer::default().text(attribute::OBJECT_TABLE, TABLE);
    dump("the counters", libc::NFT_MSG_GETOBJ, &of_table, &mut |object| {
        if object.text(attribute::OBJECT_TABLE).as_deref() == Some(TABLE) {
            let kind = object.u32(attribute::OBJECT_TYPE).unwrap_or_default();
            let name = object.text(attribute::OBJECT_NAME).unwrap_or_default();
            let counts = if kind == OBJECT_COUNTER { object.nest(attribute::OBJECT_DATA) } else { None };
            found.objects.insert((kind, name), counts.map(|counts| tally_of(&counts)).unwrap_or_default());
        }
    })?;
    Ok((Some(found), whole))
}

fn chain_of(chain: &Attributes<'_>) -> Chain {
    let base = chain.nest(attribute::CHAIN_HOOK).map(|hook| Base {
        kind: match chain.text(attribute::CHAIN_TYPE).as_deref() {
            Some("nat") => BaseKind::Nat,
            _ => BaseKind::Filter,
        },
        hook: match hook.u32(attribute::HOOK_NUMBER) {
            Some(1) => Hook::Input,
            Some(2) => Hook::Forward,
            Some(3) => Hook::Output,
            Some(4) => Hook::Postrouting,
            _ => Hook::Prerouting,
        },
        priority: hook.u32(attribute::HOOK_PRIORITY).unwrap_or_default() as i32,
        accepts: chain.u32(attribute::CHAIN_POLICY) == Some(libc::NF_ACCEPT as u32),
    });
    Chain { name: chain.text(attribute::CHAIN_NAME).unwrap_or_default(), base, rules: Vec::new() }
}

fn set_of(set: &Attributes<'_>) -> Set {
    let flags = set.u32(attribute::SET_FLAGS).unwrap_or_default();
    let counter =
        |expression: Attributes<'_>| expression.text(attribute::EXPR_NAME).as_deref() == Some("counter");
    Set {
        name: set.text(attribute::SET_NAME).unwrap_or_default(),
        key_type: set.u32(attribute::SET_KEY_TYPE).unwrap_or_default(),
        key_bytes: set.u32(attribute::SET_KEY_LEN).unwrap_or_default(),
        kind: match flags {
            0 if set.bytes(attribute::SET_EXPRESSIONS).is_none() => SetKind::Plain,
            RANGES_FLAGS => SetKind::Ranges,
            MAP_FLAGS if set.u32(attribute::SET_DATA_TYPE) == Some(DATA_VERDICT_TYPE) => SetKind::Verdicts,
            MAP_FLAGS if set.u32(attribute::SET_DATA_TYPE) == Some(NUMBER_TYPE) => SetKind::Numbers,
            flags => SetKind::Foreign(flags),
        },
        counted: set.nest(attribute::SET_EXPR).is_some_and(counter),
    }
}

fn element_of(element: &Attributes<'_>) -> (Element, Tally) {
    let key = element.nest(attribute::ELEMENT_KEY).and_then(|key| key.bytes(attribute::DATA_VALUE));
    let data = element.nest(attribute::ELEMENT_DATA).unwrap_or_default();
    let verdict = data.nest(attribute::DATA_VERDICT);
    let number = data.bytes(attribute::DATA_VALUE);
    let flags = element.u32(attribute::ELEMENT_FLAGS).unwrap_or_default();
    let found = Element {
        key: key.unwrap_or_default().to_vec(),
        end: flags & libc::NFT_SET_ELEM_INTERVAL_END as u32 != 0,
        verdict: verdict.map(|verdict| verdict_of(&verdict)),
        number: number.map(|bytes| bytes.try_into().map(u32::from_ne_bytes).unwrap_or(u32::MAX)),
    };
    let counts = element.nest(attribute::ELEMENT_EXPR).and_then(|counter| counter.nest(attribute::EXPR_DATA));
    (found, counts.map(|counts| tally_of(&counts)).unwrap_or_default())
}

fn tally_of(counter: &Attributes<'_>) -> Tally {
    Tally {
        packets: counter.u64(attribute::COUNTER_PACKETS).unwrap_or_default(),
        bytes: counter.u64(attribute::COUNTER_BYTES).unwrap_or_default(),
    }
}

fn verdict_of(verdict: &Attributes<'_>) -> Verdict {
    let code = verdict.u32(attribute::VERDICT_CODE).unwrap_or_default() as i32;
    match (code, verdict.text(attribute::VERDICT_CHAIN)) {
        (libc::NF_ACCEPT, None) => Verdict::Accept,
        (libc::NF_DROP, None) => Verdict::Drop,
        (libc::NFT_GOTO, Some(chain)) => Verdict::Goto(chain),
        _ => Verdict::Foreign(code),
    }
}

fn expression_of(expression: &Attributes<'_>) -> Expr {
    let name = expression.text(attribute::EXPR_NAME).unwrap_or_default();
    let data = expression.nest(attribute::EXPR_DATA).unwrap_or_default();
    known_expression(&name, &data).unwrap_or_else(|| {
        let fields: Vec<_> = data.numbers().map(|number| (number, data.bytes(number))).collect();
        Expr::Foreign(format!("{name} {fields:x?}"))
    })
}

/// Nothing for an expression with anything in it that ours do not have. Fields are numbered as in the kernel.
fn known_expression(name: &str, data: &Attributes<'_>) -> Option<Expr> {
    let only = |known: &[u16]| data.numbers().all(|number| known.contains(&number)).then_some(());
    let value = |number| data.nest(number)?.bytes(attribute::DATA_VALUE).map(<[u8]>::to_vec);
    Some(match name {
        "meta" => {
            only(&[1, 2, 3])?;
            let key = data.u32(2)?;
            match (data.u32(1), data.u32(3)) {
                (Some(register), None) => Expr::Meta { key, register },
                (None, Some(register)) => Expr::SetMeta { key, register },
                _ => return None,
            }
        }
        "payload" => {
            only(&[1, 2, 3, 4])?;
            Expr::Payload {
                base: data.u32(2)?,
                offset: data.u32(3)?,
                bytes: data.u32(4)?,
                register: data.u32(1)?,
            }
        }
        "ct" => {
            only(&[1, 2])?;
            Expr::Ct { key: data.u32(2)?, register: data.u32(1)? }
        }
        "bitwise" => {
            // The operation is 0, "and then exclusive or".
            only(&[1, 2, 3, 4, 5, 6])?;
            let (mask, xor) = (value(4)?, value(5)?);
            let plain = data.u32(6).unwrap_or_default() == 0 && data.u32(1) == data.u32(2);
            (plain && xor.iter().all(|byte| *byte == 0)).then_some(())?;
            Expr::And { register: data.u32(1)?, mask }
        }
        "cmp" => {
            only(&[1, 2, 3])?;
            Expr::Compare { register: data.u32(1)?, operator: data.u32(2)?, data: value(3)? }
        }
        "lookup" => {
            only(&[1, 2, 3, 5])?;
            let kind = match (data.u32(3), data.u32(5).unwrap_or_default()) {
                (None, 0) => LookupKind::In,
                (None, flags) if flags == libc::NFT_LOOKUP_F_INV as u32 => LookupKind::NotIn,
                (Some(0), 0) => LookupKind::Verdict,
                (Some(1), 0) => LookupKind::Number,
                _ => return None,
            };
            Expr::Lookup { register: data.u32(2)?, set: data.text(1)?, kind }
        }
        "objref" => {
            only(&[1, 2])?;
            (data.u32(1)? == OBJECT_COUNTER).then_some(())?;
            Expr::Count(data.text(2)?)
        }
        "immediate" => {
            only(&[1, 2])?;
            let register = data.u32(1)?;
            if register == libc::NFT_REG_VERDICT as u32 {
                return Some(Expr::Verdict(verdict_of(&data.nest(2)?.nest(attribute::DATA_VERDICT)?)));
            }
            Expr::Immediate { register, data: value(2)? }
        }
        "masq" => {
            only(&[])?;
            Expr::Masquerade
        }
        _ => return None,
    })
}
