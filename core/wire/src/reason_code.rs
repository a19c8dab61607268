//! Reasons in one byte.

/// Why something waits, stops or ends, in one byte on the wire.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ReasonCode {
    /// No reason is given.
    None = 0,
    /// No link is up.
    NoPath = 1,
    /// The only link that is up costs money that this flow may not spend yet.
    PathCost = 2,
    /// The flow's or link's budget is used up.
    OverBudget = 3,
    /// The link answers too slowly to be of use.
    PathTooSlow = 4,
    /// The user paused it.
    UserPaused = 5,
    /// Another flow goes first.
    QueuedBehind = 6,
    /// The flow's deadline passed.
    DeadlinePassed = 7,
    /// The host does not know this flow.
    UnknownFlow = 8,
    /// The host knows the flow, but its state is older than the offset claimed.
    RolledBack = 9,
    /// A limit of this host was reached.
    LimitReached = 10,
    /// The application ended it.
    Application = 11,
    /// The host is stopping.
    Stopping = 12,
    /// The peer broke a rule of the protocol.
    Protocol = 13,
    /// The server's list of allowed clients does not contain this client.
    NotAllowed = 14,
    /// The device goes to sleep.
    Sleeping = 15,
    /// Both directions of the path's link contend for one medium.
    HalfDuplex = 16,
    /// The path costs money, and its user allows it to carry ACKs of other paths.
    TakesAcks = 17,
}

impl ReasonCode {
    /// The reason that a byte stands for. A value that only newer versions define reads as
    /// [`ReasonCode::None`].
    pub fn from_u8(b: u8) -> ReasonCode {
        use ReasonCode::*;
        const ALL: [ReasonCode; 18] = [
            None,
            NoPath,
            PathCost,
            OverBudget,
            PathTooSlow,
            UserPaused,
            QueuedBehind,
            DeadlinePassed,
            UnknownFlow,
            RolledBack,
            LimitReached,
            Application,
            Stopping,
            Protocol,
            NotAllowed,
            Sleeping,
            HalfDuplex,
            TakesAcks,
        ];
        ALL.get(usize::from(b)).copied().unwrap_or(None)
    }
}
