//! What the firewall costs with many tenants in it, beside the same with few: a packet, and one tenant more.

use anyhow::{Result, anyhow};

use crate::effort::Effort;
use crate::firewall_lab::FirewallLab;
use crate::row::{Goal, Row, Subject, Unit};

const MANY: u16 = 1000;
const FEW: u16 = 10;
const PACKET_GOAL: Goal = Goal::RatioAtMost(1.1);
const TENANT_GOAL: Goal = Goal::RatioAtMost(1.5);
/// In each half of a pair.
const PACKETS: u32 = 20_000;
const ADDITIONS: u32 = 50;

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let lab = |tenants| FirewallLab::with_tenants(tenants).map_err(|error| anyhow!("{error}"));
    let (mut many, mut few) = (lab(MANY)?, lab(FEW)?);
    let packet = |lab: &mut FirewallLab| {
        let took = lab.per_packet(PACKETS).map_err(|error| anyhow!("{error}"))?;
        Ok::<_, anyhow::Error>(took.as_secs_f64() * 1e6)
    };
    let tenant = |lab: &mut FirewallLab| {
        let took = lab.per_tenant(ADDITIONS).map_err(|error| anyhow!("{error}"))?;
        Ok::<_, anyhow::Error>(took.as_secs_f64() * 1e6)
    };
    let (mut packets, mut tenants) = (Vec::new(), Vec::new());
    for _ in 0..effort.pairs {
        packets.push((packet(&mut many)?, packet(&mut few)?));
        tenants.push((tenant(&mut many)?, tenant(&mut few)?));
    }
    let row = |name: String, pairs: &[(f64, f64)], goal| {
        let ours: Vec<f64> = pairs.iter().map(|(many, _)| *many).collect();
        let row = Row::of(Subject::Firewall, name, &ours, Unit::Microseconds);
        row.beside(format!("{FEW} tenants"), pairs).goal(goal)
    };
    Ok(vec![
        row(format!("a packet to the world, {MANY} tenants"), &packets, PACKET_GOAL)
            .note("guest, bridge, firewall, masquerade and the world's link, on one core"),
        row(format!("one tenant with one instance more, {MANY} tenants"), &tenants, TENANT_GOAL),
    ])
}
