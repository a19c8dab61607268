//! Tests of a machine with logind, with a stand-in for logind on a bus of the test. They pass with
//! a message if there is no bus program.

use cedos_lab_rig::PATIENCE;
use cedos_lab_rig::bus::ServiceBus;
use d2tp_power::{LinuxMachine, Logind, PowerEvent, SleepingMachine, WakeController, WakeReason};
use d2tp_sched::WakePlan;
use d2tp_time::{Span, Time};
use tokio::time::timeout;
use zbus::Variant;

const NAME: &str = "org.freedesktop.login1";
const PATH: &str = "/org/freedesktop/login1";

async fn bus() -> Option<ServiceBus> {
    ServiceBus::with("logind", NAME).await
}

async fn linux(bus: &ServiceBus) -> LinuxMachine {
    LinuxMachine::with(Logind::on(&bus.connect().await).await).unwrap()
}

#[tokio::test]
async fn a_vigil_that_holds_keeps_the_machine_awake_until_the_next_one_lets_go() {
    let Some(bus) = bus().await else { return };
    let mut keeper = WakeController::new(linux(&bus).await);
    let holds = WakePlan {
        hold: true,
        ..WakePlan::default()
    };
    // A second call changes nothing.
    for _ in 0..2 {
        keeper.apply(Time::ZERO, holds, "a.mp3 is on wlan0").await;
    }
    let expected = ["sleep:idle", "Cedos", "a.mp3 is on wlan0", "block"];
    assert_eq!(bus.inhibitors().await, [expected.map(str::to_owned)]);
    keeper.apply(Time::ZERO, WakePlan::default(), "").await;
    let gone = async {
        while !bus.inhibitors().await.is_empty() {
            tokio::task::yield_now().await;
        }
    };
    timeout(PATIENCE, gone).await.unwrap();
}

#[tokio::test]
async fn sleep_is_heard_of_and_alarms_ring_beside_it() {
    let Some(bus) = bus().await else { return };
    let mut linux = linux(&bus).await;
    let mock = bus.mock(NAME, PATH).await;
    for (sleeps, notice) in [(true, PowerEvent::Suspending), (false, PowerEvent::Resumed)] {
        let args: Vec<Variant<'_>> = vec![Variant::from(sleeps)];
        let said = ("", "PrepareForSleep", "b", args);
        let _: () = mock.call("EmitSignal", &said).await.unwrap();
        assert_eq!(timeout(PATIENCE, linux.next_event()).await.unwrap(), notice);
    }
    linux.set_alarm(WakeReason::StartFlow, Some(Span::from_millis(1)));
    linux.set_alarm(WakeReason::ScanLinks, Some(Span::from_secs(3_600)));
    assert_eq!(
        timeout(PATIENCE, linux.next_event()).await.unwrap(),
        PowerEvent::AlarmFired(WakeReason::StartFlow)
    );
}

#[tokio::test]
async fn a_machine_without_logind_says_so_and_has_its_alarms() {
    let Some(bus) = bus().await else { return };
    let none = bus.connect().await;
    drop(bus);
    let mut linux = LinuxMachine::with(Logind::on(&none).await).unwrap();
    assert!(
        linux
            .limitations()
            .iter()
            .any(|lack| lack.contains("logind")),
        "{:?}",
        linux.limitations()
    );
    linux.inhibit_sleep("in vain").await;
    linux.set_alarm(WakeReason::ScanLinks, Some(Span::from_millis(1)));
    assert_eq!(
        timeout(PATIENCE, linux.next_event()).await.unwrap(),
        PowerEvent::AlarmFired(WakeReason::ScanLinks)
    );
}
