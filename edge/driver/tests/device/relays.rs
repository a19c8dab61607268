//! Relays that a server provides to its devices.

use std::net::SocketAddr;

use cedos_lab_rig::wait::within;
use d2tp_driver::{
    Admission, CallEvent, Device, DeviceOptions, EndpointConfig, Flow, FlowIo, FlowSettings,
    HibernationOptions, HostKey, MemoryPool, RelayError, RelayLimits, RelayRefusal, Server,
    ServerAddress, ServerOptions,
};
use tokio::io::AsyncWriteExt;

use crate::support::{key, server_with};

fn relaying(memory: &MemoryPool) -> Server {
    let server = server_with(EndpointConfig {
        memory: memory.clone(),
        ..EndpointConfig::default()
    });
    server.relay_for_devices(RelayLimits {
        client: 1_000,
        all: 1_000,
    });
    server
}

/// A device with this key, and the server's end of a flow of it.
async fn client(server: &Server, n: u8) -> (Device, Flow, Flow) {
    let options = DeviceOptions {
        server: ServerAddress::new("127.0.0.1", server.local_addr().port(), server.public_key()),
        key: key(n),
        config: EndpointConfig::default(),
    };
    let device = Device::new(options).await.expect("a device");
    device.use_default_route().expect("a route");
    let mut near = device.open(FlowSettings::default()).expect("a flow");
    near.write_all(b"!").await.expect("it is open");
    let far = within(server.accept()).await.expect("the flow");
    (device, near, far)
}

fn public(n: u8) -> HostKey {
    key(n).public().0
}

#[tokio::test]
async fn a_session_that_listens_again_is_still_called_when_its_first_registration_ends() {
    let server = relaying(&MemoryPool::default());
    let (_callee, _near, far) = client(&server, 7).await;
    let (_caller, _calls, calling) = client(&server, 8).await;
    let of_callee = far.relays().expect("the server relays");
    let mut first = of_callee.listen(Admission::Anybody).expect("it listens");
    let mut second = of_callee.listen(Admission::Anybody).expect("it listens");
    assert_eq!(within(first.next()).await, None, "it listens elsewhere now");
    drop(first);
    let of_caller = calling.relays().expect("the server relays");
    let _relay = of_caller.relay_to_device(public(7)).expect("it listens");
    let call = within(second.next()).await;
    assert!(matches!(call, Some(CallEvent::Call(_, by)) if by == public(8)));
    drop(second);
    let refused = of_caller.relay_to_device(public(7)).err();
    let nobody = RelayError::Refused(RelayRefusal::NobodyListens);
    assert_eq!(refused.map(|e| e.to_string()), Some(nobody.to_string()));
}

#[tokio::test]
async fn a_listener_that_reads_nothing_gets_a_bounded_number_of_calls() {
    let server = relaying(&MemoryPool::default());
    let (_callee, _near, far) = client(&server, 7).await;
    let (_caller, _calls, calling) = client(&server, 8).await;
    let of_callee = far.relays().expect("the server relays");
    let mut unread = of_callee.listen(Admission::Anybody).expect("it listens");
    let of_caller = calling.relays().expect("the server relays");
    let mut refused = 0;
    for _ in 0..500 {
        // Each call is ended at once, so that no limit on open relays holds it.
        match of_caller.relay_to_device(public(7)) {
            Ok(relay) => drop(relay),
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 400, "{refused} calls were refused");
    assert!(matches!(
        within(unread.next()).await,
        Some(CallEvent::Call(..))
    ));
    within(unread.next()).await.expect("it hung up");
    of_caller
        .relay_to_device(public(7))
        .expect("there is room again");
}

#[tokio::test]
async fn a_listener_that_reads_late_hears_the_end_of_every_call() {
    let server = relaying(&MemoryPool::default());
    let (_callee, _near, far) = client(&server, 7).await;
    let (_caller, _calls, calling) = client(&server, 8).await;
    let of_callee = far.relays().expect("the server relays");
    let mut unread = of_callee.listen(Admission::Anybody).expect("it listens");
    let of_caller = calling.relays().expect("the server relays");
    let call = || of_caller.relay_to_device(public(7)).ok();
    let open = call().expect("it listens");
    // As many calls as are told, which end unheard.
    while let Some(relay) = call() {
        drop(relay);
    }
    drop(open);
    let mut calls = 0;
    loop {
        match within(unread.next()).await.expect("it listens") {
            CallEvent::Call(..) => calls += 1,
            CallEvent::HungUp(_) => calls -= 1,
        }
        if calls == 0 {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_between_clients_of_different_workers_are_heard_and_limited_and_end() {
    let options = ServerOptions {
        listen: "127.0.0.1:0".parse().expect("an address"),
        key: key(2),
        admission: Admission::Anybody,
        config: EndpointConfig::default(),
    };
    let rest = HibernationOptions::default();
    let server = Server::bind_workers(3, options, rest).expect("a port");
    server.relay_for_devices(RelayLimits {
        client: 3,
        all: 1_000,
    });
    let (_callee, _near, far) = client(&server, 7).await;
    let of_callee = far.relays().expect("the server relays");
    let mut calls = of_callee.listen(Admission::Anybody).expect("it listens");
    let mut callers = Vec::new();
    for n in 8..16 {
        let (caller, near, calling) = client(&server, n).await;
        let of_caller = calling.relays().expect("the server relays");
        let relay = of_caller.relay_to_device(public(7)).expect("it listens");
        let Some(CallEvent::Call(theirs, by)) = within(calls.next()).await else {
            panic!("a call");
        };
        assert_eq!(by, public(n));
        assert_ne!(theirs, relay.id());
        // A call counts as two relays, wherever its halves are.
        let refused = of_caller.relay_to_device(public(7)).err();
        let limit = RelayError::Refused(RelayRefusal::ClientFull(3));
        assert_eq!(refused.map(|e| e.to_string()), Some(limit.to_string()));
        drop(relay);
        assert_eq!(
            within(calls.next()).await,
            Some(CallEvent::HungUp(theirs)),
            "of {n}"
        );
        let again = of_caller.relay_to_device(public(7)).expect("there is room");
        within(calls.next()).await.expect("a call");
        callers.push((caller, near, calling, again));
    }
    let by_worker = server.counts_by_worker();
    assert!(
        by_worker.iter().all(|(awake, ..)| *awake > 0),
        "{by_worker:?}"
    );
}

#[tokio::test]
async fn relays_to_addresses_without_room_in_memory_are_refused_and_one_that_ends_makes_room() {
    let memory = MemoryPool::new(40_000_000);
    let server = relaying(&memory);
    let (_caller, _near, far) = client(&server, 8).await;
    let hosting = far.relays().expect("the server relays");
    let to: SocketAddr = "127.0.0.1:9".parse().expect("an address");
    let mut relays = Vec::new();
    let refusal = loop {
        match hosting.relay_to_address(to) {
            Ok(relay) => relays.push(relay),
            Err(refusal) => break refusal,
        }
        assert!(relays.len() < 100, "nothing bounds them");
    };
    assert!(matches!(
        refusal,
        RelayError::Refused(RelayRefusal::NoMemory)
    ));
    assert!(relays.len() > 1);
    relays.pop();
    hosting.relay_to_address(to).expect("there is room again");
}
