// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

func TestThePodsNetworkFollowsFromThePort(t *testing.T) {
	n, err := freeNetwork()
	if err != nil {
		t.Fatal(err)
	}
	want := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(n.kubeletPort >> 8), byte(n.kubeletPort), 0}), 24)
	if n.pods != want || n.kubeletPort == n.healthzPort {
		t.Errorf("got %+v, want two ports and pods %s", n, want)
	}
	if links, err := n.links(); err != nil || len(links) != 0 {
		t.Errorf("links of an unused network: got %v, %v", links, err)
	}
}

func TestTheNetworkConfigurationIsCompleteJSON(t *testing.T) {
	l := layout{dir: t.TempDir()}
	if err := l.make(); err != nil {
		t.Fatal(err)
	}
	if err := (network{pods: netip.MustParsePrefix("10.1.2.0/24")}).writeCNI(l); err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(filepath.Join(l.cniConfig(), "10-stowage.conflist"))
	if err != nil {
		t.Fatal(err)
	}
	var config struct {
		Plugins []struct {
			Type string
			IPAM struct {
				DataDir string
				Ranges  [][]struct{ Subnet string }
			}
		}
	}
	if err := json.Unmarshal(data, &config); err != nil {
		t.Fatal(err)
	}
	plugin := config.Plugins[0]
	if plugin.Type != "ptp" || plugin.IPAM.Ranges[0][0].Subnet != "10.1.2.0/24" || filepath.Dir(plugin.IPAM.DataDir) != l.path("cni") {
		t.Errorf("got %s", data)
	}
}

func TestEveryKernelSettingOfThisMachineIsHidden(t *testing.T) {
	l := layout{dir: t.TempDir()}
	binds, err := hideSettings(l)
	if err != nil {
		t.Fatal(err)
	}
	byTarget := map[string]enclosure.Bind{}
	for _, bind := range binds {
		byTarget[bind.Target] = bind
	}
	for name, value := range wantedSettings {
		target := filepath.Join("/proc/sys", name)
		if _, err := os.Stat(target); err != nil {
			continue
		}
		content, err := os.ReadFile(byTarget[target].Source)
		if err != nil || string(content) != value+"\n" {
			t.Errorf("%s: got %q, %v; want %q", target, content, err, value)
		}
	}
}
