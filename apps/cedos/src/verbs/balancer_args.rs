//! Options of a proxy that shares its address with others, behind a load balancer.

use clap::Args;
use d2tp_driver::CidShare;

/// The part of all packets that the balancer sends to this proxy.
#[derive(Clone, Copy, Debug, Default, Args)]
pub struct BalancerArgs {
    /// The part of the balancer's packets that comes to this proxy: INDEX of NODES, counted from 0, such as 0/3.
    /// It issues connection ids that lead here
    #[arg(long, value_name = "INDEX/NODES", requires = "balancer_seed", value_parser = parse_share)]
    balancer_share: Option<(u16, u16)>,
    /// The seed of the balancer's hash, in hexadecimal: the same at the balancer and all its proxies
    #[arg(long, value_name = "HEX", requires = "balancer_share", value_parser = parse_seed)]
    balancer_seed: Option<u32>,
}

impl BalancerArgs {
    /// The share of connection ids; none without a balancer.
    pub fn cid_share(&self) -> Option<CidShare> {
        let (index, nodes) = self.balancer_share?;
        CidShare::new(self.balancer_seed?, index, nodes).ok()
    }
}

fn parse_share(text: &str) -> Result<(u16, u16), String> {
    let parts = text
        .split_once('/')
        .ok_or("give INDEX/NODES, such as 0/3")?;
    let number = |text: &str| text.parse().map_err(|_| format!("{text} is not a number"));
    let (index, nodes) = (number(parts.0)?, number(parts.1)?);
    let share = CidShare::new(0, index, nodes).map_err(|error| error.to_string())?;
    Ok((index, share.shares()))
}

fn parse_seed(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    u32::from_str_radix(digits, 16).map_err(|_| format!("{text} is not up to 8 hexadecimal digits"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        balancer: BalancerArgs,
    }

    fn parse(line: &str) -> Result<Option<CidShare>, clap::Error> {
        Cli::try_parse_from(line.split(' ')).map(|cli| cli.balancer.cid_share())
    }

    #[test]
    fn a_share_needs_a_seed_and_an_index_below_the_number_of_nodes() {
        let share = parse("prox --balancer-share 2/3 --balancer-seed 0x1f2e3d4c").unwrap();
        assert_eq!(share, CidShare::new(0x1f2e_3d4c, 2, 3).ok());
        assert_eq!(parse("prox").unwrap(), None);
        for mistake in [
            "--balancer-share 2/3",
            "--balancer-seed 1",
            "--balancer-share 3/3 --balancer-seed 1",
            "--balancer-share 0/0 --balancer-seed 1",
            "--balancer-share 0/300 --balancer-seed 1",
            "--balancer-share 0/2 --balancer-seed 123456789",
        ] {
            assert!(parse(&format!("prox {mistake}")).is_err(), "{mistake}");
        }
    }
}
