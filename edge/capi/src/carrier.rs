//! The engine of an agent: it carries sockets of other programs that use this library, with one device's
//! links, sessions and scheduler for all of them (`docs/agent.md`, "Sockets of programs").
//!
//! The same tasks carry as in a program's own engine (`connect`, `pump`, `policy`); only who decides about
//! links that cost is another, and whoever the socket belongs to is told by messages.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use d2tp_driver::Way;
use d2tp_links::Link;
use d2tp_sched::Need;
use tokio::net::UnixStream;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use crate::connect;
use crate::errno::Fault;
use crate::home::Home;
use crate::info::D2tpInfo;
pub use crate::message::{Call, VERSION};
use crate::message::{Ear, FromAgent, ToAgent, say};
use crate::options::Options;
use crate::pair::{self, Port};
use crate::pump::{self, Held};
use crate::table::Fate;

/// Sockets that are carried at a time; further ones are their own processes' to carry. Each takes two
/// descriptors, of which a process has a thousand unless it is given more.
pub const SOCKETS_MAX: usize = 384;

/// Flushes of one socket that are waited for at a time; others are answered "not yet".
const ASKS_MAX: usize = 64;

/// How long a program may take to hear of a fault before its socket breaks without it.
const HEARD_WITHIN: Duration = Duration::from_secs(1); // a guess: it is on this machine

/// How long what programs wrote before they ended is waited for when the agent ends.
const LAST_WORDS: Duration = Duration::from_secs(5); // as `exit` of a program

/// For the last packets.
const GRACE: Duration = Duration::from_millis(20); // as the driver's own

/// How a socket stands, as who decides is told.
#[derive(Debug)]
pub struct Standing<'a> {
    /// What it needs.
    pub need: Need,
    /// Bytes both ways, when known.
    pub size: Option<u64>,
    /// Of a socket that names thresholds: bytes that may be paid for now, however soon free links may come. Its
    /// needs are those of what is ahead of its program.
    pub fills: Option<u64>,
    /// The links of its session.
    pub ways: &'a [Way],
    /// Payload that each carried for it, to this device and from it.
    pub carried: &'a BTreeMap<String, (u64, u64)>,
}

/// What is decided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Links that cost carry it.
    pub pays: bool,
    /// They carry so many bytes of it, to be measured.
    pub probe: Option<u64>,
}

/// Who decides for all sockets, and whatever else a device carries, together.
pub trait Judge {
    /// A place for a socket while it wants something.
    fn seat(&self) -> Box<dyn Seat>;
}

/// The place of one socket.
pub trait Seat {
    /// Tells how it stands, and asks.
    fn decide(&mut self, standing: &Standing<'_>) -> Decision;

    /// Tells how it stood at its end.
    fn leave(&mut self, standing: &Standing<'_>);
}

/// What an agent carries for programs.
pub struct Carrier {
    home: Rc<Home>,
    sockets: Cell<usize>,
}

impl Carrier {
    /// Over these links, as `judge` decides. Must be called on a runtime, in a set of local tasks.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(
        links: watch::Receiver<Arc<Vec<Link>>>,
        judge: Rc<dyn Judge>,
    ) -> std::io::Result<Carrier> {
        Ok(Carrier {
            home: Rc::new(Home::of_agent(Port::without_programs()?, links, judge)),
            sockets: Cell::new(0),
        })
    }

    /// Why this is not carried, if it is not.
    pub fn refusal(&self, call: &Call) -> Option<String> {
        if call.version != VERSION {
            let ours = format!("this agent carries sockets by version {VERSION} of these messages");
            return Some(format!("{ours}, not {}", call.version));
        }
        if self.sockets.get() >= SOCKETS_MAX {
            return Some(format!("{SOCKETS_MAX} sockets are carried already"));
        }
        None
    }

    /// Carries what was asked for on `stream`, and tells there what becomes of it.
    pub async fn carry(&self, stream: UnixStream, call: Call) {
        self.sockets.set(self.sockets.get() + 1);
        let _place = Place(&self.sockets);
        let stream = Rc::new(stream);
        let taken = FromAgent::Taken {
            ok: true,
            version: VERSION,
        };
        if say(&stream, &taken, None).await.is_err() {
            return;
        }
        let mut ear = Ear::new(stream.clone());
        let Ok(Some(ToAgent::Carry { from })) = ear.next().await else {
            return;
        };
        let Some(end) = ear.passed() else {
            return;
        };
        let (tell, to_tell) = unbounded_channel();
        let owner = Rc::new(Owner {
            tell,
            heard: Notify::new(),
            gone: watch::channel(false).0,
            options: RefCell::new(None),
            held: RefCell::default(),
            asks: RefCell::default(),
        });
        let telling = tokio::task::spawn_local(tell_all(stream, to_tell));
        let listening = tokio::task::spawn_local(listen(ear, owner.clone()));
        self.make(&owner, &call, end, from).await;
        owner.say(FromAgent::Over);
        listening.abort();
        // Whatever waits for an answer holds the owner.
        owner.held.borrow_mut().take();
        drop(owner);
        let _ = timeout(HEARD_WITHIN, telling).await;
    }

    async fn make(&self, owner: &Rc<Owner>, call: &Call, end: OwnedFd, from: u16) {
        let fate = Fate::new();
        let opened = async {
            let options = Options::try_from(&call.options)?;
            let server = call.server.parse();
            let way = connect::Way {
                server: server.map_err(|error| Fault::new(libc::EINVAL, error))?,
                target: call.target.clone(),
                key: Some(call.key.clone()),
            };
            let latest = || owner.options.borrow().clone();
            connect::open(&self.home, &way, &options, fate.clone(), latest).await
        };
        let opened = tokio::select! {
            opened = opened => opened,
            // Nobody waits for it any more.
            () = owner.gone() => return,
        };
        let held = match opened {
            Ok(held) => pump::enter(&self.home, held.owned_by(owner.clone())),
            Err(fault) => return owner.say(FromAgent::fault(&fault)),
        };
        // From now on the program's second thoughts are for the flow.
        owner.held.borrow_mut().replace(held.clone());
        // First, so that its library never takes a connection that was made for one to be made again.
        owner.tell(FromAgent::Open).await;
        // Otherwise the program closed its socket: so does the flow.
        match pair::join(end.into(), from).await {
            Ok(stream) => pump::run(self.home.clone(), held, stream).await,
            Err(_) => pump::leave(&self.home, &held),
        }
    }

    /// Ends: what programs wrote before they ended is sent, and servers hear that this device goes.
    pub async fn close(&self) {
        let is_left = |held: &Rc<Held>| held.is_orphan() && !held.is_delivered();
        let delivered = async {
            while self.home.flows.borrow().values().any(is_left) {
                tokio::time::sleep(GRACE).await;
            }
        };
        let _ = timeout(LAST_WORDS, delivered).await;
        if self.home.say_goodbye() {
            tokio::time::sleep(GRACE).await;
        }
    }
}

struct Place<'a>(&'a Cell<usize>);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// What is to be told, and who waits until it is.
type Telling = (FromAgent, Option<oneshot::Sender<()>>);

/// Whose a socket is, at the other end of its messages.
pub(crate) struct Owner {
    tell: UnboundedSender<Telling>,
    heard: Notify,
    gone: watch::Sender<bool>,
    /// Other options than those it began with.
    options: RefCell<Option<Options>>,
    held: RefCell<Option<Rc<Held>>>,
    /// Flushes that are waited for.
    asks: RefCell<HashMap<u64, AbortHandle>>,
}

impl Owner {
    fn say(&self, what: FromAgent) {
        // One that is gone needs no words.
        let _ = self.tell.send((what, None));
    }

    /// The same; returns when the kernel has it.
    async fn tell(&self, what: FromAgent) {
        let (done, told) = oneshot::channel();
        let _ = self.tell.send((what, Some(done)));
        let _ = told.await;
    }

    /// Tells why its socket is about to break, so that it knows when it does.
    pub(crate) async fn warn(&self, fault: &Fault) {
        self.say(FromAgent::fault(fault));
        let heard = async {
            tokio::select! {
                () = self.heard.notified() => {}
                () = self.gone() => {}
            }
        };
        let _ = timeout(HEARD_WITHIN, heard).await;
    }

    /// Waits until its process has ended, or let go of the connection.
    pub(crate) async fn gone(&self) {
        let mut gone = self.gone.subscribe();
        // Whoever says it is here.
        let _ = gone.wait_for(|gone| *gone).await;
    }

    pub(crate) fn is_gone(&self) -> bool {
        *self.gone.borrow()
    }

    fn change(&self, options: Options) {
        if let Some(held) = &*self.held.borrow() {
            held.change(options.clone());
        }
        self.options.replace(Some(options));
    }

    fn answer(&self, ask: u64, fault: Option<Fault>, info: Option<D2tpInfo>) {
        self.say(FromAgent::Answer {
            ask,
            fault: fault.map(|fault| (fault.errno, fault.text)),
            info: info.map(Box::new),
        });
    }
}

async fn tell_all(stream: Rc<UnixStream>, mut to_tell: UnboundedReceiver<Telling>) {
    while let Some((what, waits)) = to_tell.recv().await {
        if say(&stream, &what, None).await.is_err() {
            return;
        }
        if let Some(waits) = waits {
            let _ = waits.send(());
        }
    }
}

async fn listen(mut ear: Ear, owner: Rc<Owner>) {
    loop {
        match ear.next().await {
            Ok(Some(ToAgent::Options { options })) => {
                // What its library took is no nonsense.
                if let Ok(options) = Options::try_from(&options) {
                    owner.change(options);
                }
            }
            Ok(Some(ToAgent::Info { ask })) => {
                let held = owner.held.borrow().clone();
                let info = held.map_or_else(D2tpInfo::opening, |held| D2tpInfo::of(&held));
                owner.answer(ask, None, Some(info));
            }
            Ok(Some(ToAgent::Flush { ask, bytes })) => {
                if owner.asks.borrow().len() >= ASKS_MAX {
                    let fault = Fault::new(libc::EAGAIN, "too many wait for it");
                    owner.answer(ask, Some(fault), None);
                    continue;
                }
                let held = owner.held.borrow().clone();
                let asker = owner.clone();
                let flushing = tokio::task::spawn_local(async move {
                    let owner = asker;
                    let flushed = async {
                        match held {
                            Some(held) => held.flush(bytes).await.err(),
                            None => Some(Fault::new(libc::ENOTCONN, "it is not connected yet")),
                        }
                    };
                    tokio::select! {
                        fault = flushed => owner.answer(ask, fault, None),
                        () = owner.gone() => {}
                    }
                    owner.asks.borrow_mut().remove(&ask);
                });
                let asks = &owner.asks;
                asks.borrow_mut().insert(ask, flushing.abort_handle());
            }
            Ok(Some(ToAgent::Forget { ask })) => {
                if let Some(flushing) = owner.asks.borrow_mut().remove(&ask) {
                    flushing.abort();
                }
            }
            Ok(Some(ToAgent::Heard)) => owner.heard.notify_one(),
            Ok(Some(ToAgent::Socket(_) | ToAgent::Carry { .. })) => {}
            Ok(None) | Err(_) => {
                owner.gone.send_replace(true);
                return;
            }
        }
    }
}
