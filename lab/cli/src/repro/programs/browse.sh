# A browser without a window, until its page has said what it got: browse.sh chromium|firefox WHO PROXY URL.
# PROXY: host:port, or none.
browser=$1 who=$2 proxy=$3 url=$4
profile="$AT/profile-$who"
mkdir -p "$profile"
unset http_proxy https_proxy all_proxy HTTP_PROXY HTTPS_PROXY ALL_PROXY
export HOME="$profile"
if [ "$browser" = chromium ]; then
    way="--no-proxy-server"
    [ "$proxy" = none ] || way="--proxy-server=http://$proxy"
    chromium --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --mute-audio \
        --disable-background-networking --disable-component-update --autoplay-policy=no-user-gesture-required \
        --user-data-dir="$profile" "$way" "$url" &
else
    kind=0
    [ "$proxy" = none ] || kind=1
    cat >"$profile/user.js" <<PREFS
user_pref("network.proxy.type", $kind);
user_pref("network.proxy.http", "${proxy%:*}");
user_pref("network.proxy.http_port", ${proxy##*[!0-9]});
user_pref("network.captive-portal-service.enabled", false);
user_pref("network.connectivity-service.enabled", false);
user_pref("media.autoplay.default", 0);
user_pref("browser.shell.checkDefaultBrowser", false);
user_pref("browser.aboutwelcome.enabled", false);
user_pref("datareporting.policy.dataSubmissionEnabled", false);
user_pref("toolkit.telemetry.enabled", false);
user_pref("app.update.enabled", false);
PREFS
    [ "$proxy" = none ] && sed -i '/http_port/d' "$profile/user.js"
    firefox-esr --headless --no-remote --profile "$profile" "$url" &
fi
running=$!
until grep -q "who=$who&times=[01]&" "$AT/reports"; do
    kill -0 $running || exit 1
    sleep 0.2
done 2>/dev/null
kill $running
wait $running
exit 0
