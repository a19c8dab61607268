//! How fast a flow's server supplies it, compared with what links carry.

/// The standard deviation of the logarithm of the supplied rate relative to the recent rate.
pub(crate) const SUPPLY_DOUBT: f64 = 0.35; // a guess: that of links (`completion_estimate.rs`)

/// The rate at which a flow's source, the server behind the links, supplies it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum SourceSupply {
    /// The source has more data than the links carry, as far as is known.
    #[default]
    Ample,
    /// The flow is too young to tell, and it will be known within seconds.
    Unknown,
    /// The links wait for the source.
    Limited {
        /// The rate of the source, in bytes per second.
        bytes_per_s: f64,
    },
    /// The user limits the rate of the flow, so that the links wait for that.
    Throttled {
        /// The limit, in bytes per second.
        bytes_per_s: f64,
    },
    /// The flow itself found a metered link to be no faster for it than a free one. How fast its source
    /// could be, it does not know.
    NoFasterOnMetered {
        /// The flow's rate on the free link, in bytes per second.
        bytes_per_s: f64,
    },
}

impl SourceSupply {
    /// The rate above which more links do not help, in bytes per second.
    pub fn limit(self) -> Option<f64> {
        match self {
            SourceSupply::Limited { bytes_per_s }
            | SourceSupply::Throttled { bytes_per_s }
            | SourceSupply::NoFasterOnMetered { bytes_per_s } => Some(bytes_per_s),
            SourceSupply::Ample | SourceSupply::Unknown => None,
        }
    }

    /// The supply of a flow whose rate the user limits, by this supply of its source.
    #[must_use]
    pub fn throttled(self, bytes_per_s: f64) -> SourceSupply {
        match self.limit() {
            Some(limit) if limit <= bytes_per_s => self,
            _ => SourceSupply::Throttled { bytes_per_s },
        }
    }

    /// Whether the flow's rate shows the capacity of its links.
    pub(crate) fn measures_links(self) -> bool {
        self == SourceSupply::Ample
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_of_the_server_and_the_users_limit_holds() {
        let throttled = SourceSupply::Throttled { bytes_per_s: 10.0 };
        for faster in [
            SourceSupply::Ample,
            SourceSupply::Unknown,
            SourceSupply::Limited { bytes_per_s: 20.0 },
        ] {
            assert_eq!(faster.throttled(10.0), throttled);
        }
        let slower = SourceSupply::Limited { bytes_per_s: 5.0 };
        assert_eq!(slower.throttled(10.0), slower);
        assert!(!throttled.measures_links() && throttled.limit() == Some(10.0));
    }
}
