//! A leased instance whose process ends at any time: the next one goes on with its flows, from its record and from what
//! was stored.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use cedos_lab_rig::wait::{until, within};
use d2tp_driver::{
    Admission, Device, DeviceOptions, EndpointConfig, FlowIo as _, FlowSettings, InstanceLease,
    LeaseClaim, ReceivedStore, ResumedLease, SecretKey, Server, ServerAddress, ServerOptions,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const BYTES: usize = 6_000_000;

fn content(salt: u64) -> Vec<u8> {
    let byte = |at: u64| (at.wrapping_mul(0x9e37_79b9 + salt) >> 11) as u8;
    (0..BYTES as u64).map(byte).collect()
}

fn key(n: u8) -> SecretKey {
    SecretKey::from_bytes([n; 32])
}

#[derive(Default)]
struct Stored {
    bytes: Vec<u8>,
    is_ended: bool,
}

#[derive(Default)]
struct Memory(Mutex<Stored>);

impl ReceivedStore for Memory {
    fn keep(&self, offset: u64, bytes: &[u8]) {
        let mut stored = self.0.lock().unwrap();
        assert_eq!(offset, stored.bytes.len() as u64);
        stored.bytes.extend(bytes);
    }
    fn commit(&self, offset: u64, is_end: bool) {
        let mut stored = self.0.lock().unwrap();
        assert_eq!(offset, stored.bytes.len() as u64);
        stored.is_ended = is_end;
    }
}

impl Memory {
    fn len(&self) -> u64 {
        self.0.lock().unwrap().bytes.len() as u64
    }
}

#[tokio::test]
async fn flows_go_on_in_the_next_process_from_what_was_stored_and_no_byte_is_lost() {
    let server = Server::bind(ServerOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    })
    .unwrap();
    let options = || DeviceOptions {
        server: ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key()),
        key: key(1),
        config: EndpointConfig::default(),
    };
    let dir = tempfile::tempdir().unwrap();
    let (ours, theirs) = (key(1).public(), key(2).public());
    let lease = InstanceLease::take_in(dir.path(), ours, theirs).unwrap();
    let number = lease.number();
    let mut device = Device::with_lease(options(), Arc::new(lease))
        .await
        .unwrap();
    device.use_default_route().unwrap();
    let mut flow = device.open(FlowSettings::default()).unwrap();
    let (id, store) = (flow.id(), Arc::<Memory>::default());
    assert_eq!(flow.store_received(store.clone()), 0);
    let (up, down) = (content(1), content(2));
    flow.write_all(&up[..10]).await.unwrap();
    let mut far = within(server.accept()).await.unwrap();
    // The server's application can give nothing again.
    let given = down.clone();
    let (mut from, mut to) = {
        let mut ten = [0; 10];
        within(far.read_exact(&mut ten)).await.unwrap();
        assert_eq!(ten, up[..10]);
        tokio::io::split(far)
    };
    let giving = tokio::spawn(async move {
        to.write_all(&given).await.unwrap();
        to.shutdown().await.unwrap();
        to
    });
    let taking = tokio::spawn(async move {
        let mut all = Vec::new();
        from.read_to_end(&mut all).await.map(|_| all)
    });
    let waiting = vec![(id, std::process::id())];
    device.write_lease_record(waiting.clone()).unwrap();
    let (mut sent, mut read) = (10, 0);
    for _ in 0..4 {
        // Some bytes each way, and others under way when the process ends.
        let part = (sent + 700_000).min(BYTES);
        flow.write_all(&up[sent..part]).await.unwrap();
        sent = part;
        let mut bytes = vec![0; 400_000];
        let n = within(flow.read(&mut bytes)).await.unwrap();
        assert_eq!(bytes[..n], down[read..read + n]);
        read += n;
        until("more is stored than was read", || store.len() > read as u64).await;
        flow.leave_open();
        drop(flow);
        drop(device);
        // Its tasks end soon.
        let mut taken = None;
        until("the lease is free", || {
            taken = InstanceLease::take_record_in(dir.path(), ours, theirs, number).ok();
            taken.is_some()
        })
        .await;
        let (lease, record) = taken.flatten().unwrap();
        assert_eq!(record.waiting, waiting);
        // sleep: a process that ended would do nothing more; here its task has a last turn
        tokio::time::sleep(Duration::from_millis(100)).await;
        // Another process has had what is stored.
        read = store.len() as usize;
        let claim = LeaseClaim {
            flow: id,
            received: store.len(),
            sent: 10,
        };
        let claims = [claim];
        let resumed = Device::resume_lease(options(), Arc::new(lease), &record.session, &claims);
        let ResumedLease {
            device: next,
            mut flows,
        } = resumed.await.unwrap();
        (device, flow) = (next, flows.remove(0).1);
        assert_eq!(flow.store_received(store.clone()), read as u64);
        device.write_lease_record(waiting.clone()).unwrap();
        device.use_default_route().unwrap();
        let mut at = None;
        until("the server says where it is", || {
            at = flow.resumed_at();
            at.is_some()
        })
        .await;
        let at = at.unwrap() as usize;
        assert!((10..=sent).contains(&at), "{at} of {sent}");
        sent = at;
    }
    flow.write_all(&up[sent..]).await.unwrap();
    flow.shutdown().await.unwrap();
    let mut rest = Vec::new();
    within(flow.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest.len() + read, BYTES);
    assert!(store.0.lock().unwrap().bytes == down, "not the same");
    assert!(store.0.lock().unwrap().is_ended);
    let taken = within(taking).await.unwrap().unwrap();
    assert!(taken == up[10..], "not the same");
    drop(within(giving).await.unwrap());
    device.write_lease_record(Vec::new()).unwrap();
    drop(device);
    until("the lease is free", || {
        let again = InstanceLease::take_record_in(dir.path(), ours, theirs, number);
        again.is_ok_and(|none| none.is_none())
    })
    .await;
}
