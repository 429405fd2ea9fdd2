//! A node with many tenants in the firewall's sets, one of which sends packets to the world: all in namespaces of its own.
//!
//! Links are made for that one tenant; of the others the firewall knows everything, and the kernel has no bridge.

use std::error::Error;
use std::io::Write;
use std::net::{Ipv4Addr, UdpSocket};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use mvm_host::firewall::Firewall;
use mvm_host::network::{DEFAULT_MTU, Port, TenantNet};
use mvm_proto::InstanceId;
use mvm_proto::document::EgressMode;

type Told<T> = Result<T, Box<dyn Error + Send + Sync>>;
type Job = Box<dyn FnOnce() + Send>;

const WORLD: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
/// Of each tenant.
const FIRST_INSTANCE: u32 = 3;
/// Where nobody listens, and nothing answers: the world has a filter of its own.
const DISCARD: u16 = 9;

/// A thread in a network namespace of its own.
struct Space {
    jobs: Sender<Job>,
    thread_id: i32,
}

impl Space {
    fn new() -> Told<Self> {
        let (jobs, to_do) = channel::<Job>();
        let (ready, is_ready) = channel();
        std::thread::spawn(move || {
            let entered = nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET);
            let told = ready.send(entered.map(|()| nix::unistd::gettid().as_raw()));
            if told.is_ok() {
                to_do.into_iter().for_each(|job| job());
            }
        });
        let thread_id =
            is_ready.recv()?.map_err(|error| format!("a network namespace needs root: {error}"))?;
        Ok(Self { jobs, thread_id })
    }

    fn run<T: Send + 'static>(&self, job: impl FnOnce() -> Told<T> + Send + 'static) -> Told<T> {
        let (done, is_done) = channel();
        self.jobs.send(Box::new(move || drop(done.send(job())))).map_err(|_| "the namespace is gone")?;
        is_done.recv()?
    }

    /// A batch of `ip` commands or of `nft` ones.
    fn batch(&self, program: &'static str, args: &'static [&'static str], commands: String) -> Told<()> {
        self.run(move || {
            let mut child = Command::new(program).args(args).stdin(Stdio::piped()).spawn()?;
            child.stdin.take().ok_or("no input")?.write_all(commands.as_bytes())?;
            let ended = child.wait()?;
            if ended.success() { Ok(()) } else { Err(format!("{program} {commands}: {ended}").into()) }
        })
    }

    fn ip(&self, commands: String) -> Told<()> {
        self.batch("ip", &["-batch", "-"], commands)
    }
}

pub(crate) struct FirewallLab {
    guest: Space,
    _node: Space,
    _world: Space,
    firewall: Firewall,
    socket: UdpSocket,
    tenants: u16,
}

impl FirewallLab {
    pub(crate) fn with_tenants(tenants: u16) -> Told<Self> {
        let (node, world, guest) = (Space::new()?, Space::new()?, Space::new()?);
        let (sender, gateway) = (port(1)?, net(1)?.subnet.gateway());
        node.ip(format!(
            "link set lo up\nlink add up0 type veth peer name wan0 netns {}\n\
             addr add 198.51.100.2/24 dev up0\nlink set up0 up\n\
             link add {bridge} type bridge\naddr add {gateway}/28 dev {bridge}\nlink set {bridge} up\n\
             link add {tap} type veth peer name eth0 netns {}\nlink set {tap} master {bridge} up\n\
             route add default via {WORLD}\n",
            world.thread_id,
            guest.thread_id,
            bridge = sender.bridge(),
            tap = sender.tap(),
        ))?;
        node.run(|| Ok(std::fs::write("/proc/sys/net/ipv4/ip_forward", "1")?))?;
        world.ip(format!("addr add {WORLD}/24 dev wan0\nlink set wan0 up\n"))?;
        // What arrives is dropped at once: a refusal sent back would be measured too.
        let filter =
            "table ip bench {\nchain input {\ntype filter hook input priority 0\nudp dport 9 drop\n}\n}\n";
        world.batch("nft", &["-f", "-"], filter.to_owned())?;
        guest.ip(format!(
            "link set eth0 address {}\naddr add {}/28 dev eth0\nlink set eth0 up\nroute add default via {gateway}\n",
            sender.mac(),
            sender.address
        ))?;
        let (nets, ports) =
            (1..=tenants).map(|id| Ok((net(id)?, port(id)?))).collect::<Told<(Vec<_>, Vec<_>)>>()?;
        let firewall = node.run(move || {
            let mut firewall = Firewall::open()?;
            firewall.rebuild(&nets, &ports)?;
            Ok(firewall)
        })?;
        let socket = guest.run(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect((WORLD, DISCARD))?;
            Ok(socket)
        })?;
        Ok(Self { guest, _node: node, _world: world, firewall, socket, tenants })
    }

    /// How long a packet takes from the guest to the world, on the one core that does all of it. All must have passed.
    pub(crate) fn per_packet(&mut self, packets: u32) -> Told<Duration> {
        let before = self.passed()?;
        let socket = self.socket.try_clone()?;
        let took = self.guest.run(move || {
            let begun = Instant::now();
            for _ in 0..packets {
                socket.send(&[0; 64])?;
            }
            Ok(begun.elapsed())
        })?;
        let passed = self.passed()? - before;
        // The last of them may still be on their way.
        if passed + 64 < u64::from(packets) {
            let dropped = self.firewall.inspect()?.dropped;
            return Err(
                format!("{passed} of {packets} packets passed, and these were dropped: {dropped:?}").into()
            );
        }
        Ok(took / packets)
    }

    fn passed(&mut self) -> Told<u64> {
        let inspection = self.firewall.inspect()?;
        if let Some(fault) = inspection.faults.first() {
            return Err(fault.to_string().into());
        }
        Ok(inspection.tenants.get(&net(1)?.tenant).map_or(0, |traffic| traffic.sent.packets))
    }

    /// How long it takes to add a tenant with an instance, removed again out of the measure.
    pub(crate) fn per_tenant(&mut self, times: u32) -> Told<Duration> {
        let (net, port) = (net(self.tenants + 1)?, port(self.tenants + 1)?);
        let mut took = Duration::ZERO;
        for _ in 0..times {
            let begun = Instant::now();
            self.firewall.add_net(&net)?;
            self.firewall.add_port(&port)?;
            took += begun.elapsed();
            self.firewall.remove_net(net.net_id)?;
        }
        Ok(took / times)
    }
}

fn net(net_id: u16) -> Told<TenantNet> {
    let base = u32::from(Ipv4Addr::new(10, 64, 0, 0)) + u32::from(net_id) * 16;
    Ok(TenantNet {
        tenant: format!("tenant-{net_id}").parse()?,
        net_id,
        subnet: format!("{}/28", Ipv4Addr::from_bits(base)).parse()?,
        egress: EgressMode::Nat,
        dns: true,
        isolate_ports: false,
        mtu: DEFAULT_MTU,
    })
}

fn port(net_id: u16) -> Told<Port> {
    let net = net(net_id)?;
    Ok(Port {
        tenant: net.tenant,
        instance: InstanceId::from_bits(net_id.into()),
        net_id,
        offset: FIRST_INSTANCE,
        address: Ipv4Addr::from_bits(net.subnet.network().to_bits() + FIRST_INSTANCE),
        owner_uid: 0,
    })
}
