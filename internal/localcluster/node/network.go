// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"

	"github.com/vishvananda/netlink"

	"stowage.dev/stowage/internal/localcluster"
)

// network is what a node occupies of the machine's network: two ports on 127.0.0.1, and addresses for its pods that only this machine
// can reach.
type network struct {
	kubeletPort int32
	healthzPort int32
	pods        netip.Prefix
}

// freeNetwork finds ports that are free and pod addresses that no route of the machine covers. The pods' network follows from the kubelet's
// port, 10.<high byte>.<low byte>.0/24, so two nodes on one machine never have the same.
func freeNetwork() (network, error) {
	for range 20 {
		kubelet, err := localcluster.FreePort()
		if err != nil {
			return network{}, err
		}
		healthz, err := localcluster.FreePort()
		if err != nil {
			return network{}, err
		}
		n := network{kubeletPort: int32(kubelet), healthzPort: int32(healthz)}
		n.pods = netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(kubelet >> 8), byte(kubelet), 0}), 24)
		taken, err := routed(n.pods)
		if err != nil {
			return network{}, err
		}
		if !taken {
			return n, nil
		}
	}
	return network{}, fmt.Errorf("this machine has routes to so much of 10.0.0.0/8 that no /24 was found for the node's pods")
}

// routed says whether a route other than the default one leads to a part of the prefix.
func routed(prefix netip.Prefix) (bool, error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return false, fmt.Errorf("reading the machine's routes: %w", err)
	}
	for _, route := range routes {
		if route.Dst == nil {
			continue
		}
		ones, _ := route.Dst.Mask.Size()
		addr, ok := netip.AddrFromSlice(route.Dst.IP.To4())
		if ok && ones > 0 && netip.PrefixFrom(addr, ones).Overlaps(prefix) {
			return true, nil
		}
	}
	return false, nil
}

// links names the machine's links that have an address in the pods' network: the outer ends of pods' links.
func (n network) links() ([]string, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("reading the machine's links: %w", err)
	}
	var names []string
	for _, link := range links {
		addresses, err := netlink.AddrList(link, netlink.FAMILY_V4)
		if err != nil {
			continue // gone meanwhile
		}
		for _, a := range addresses {
			if addr, ok := netip.AddrFromSlice(a.IP.To4()); ok && n.pods.Contains(addr) {
				names = append(names, link.Attrs().Name)
			}
		}
	}
	return names, nil
}

// writeCNI writes the one network configuration of the node.
func (n network) writeCNI(l layout) error {
	config, err := json.MarshalIndent(map[string]any{
		"cniVersion": "1.0.0",
		"name":       "stowage",
		"plugins": []any{map[string]any{
			"type": "ptp",
			"ipam": map[string]any{
				"type":    "host-local",
				"dataDir": l.path("cni", "addresses"),
				"ranges":  [][]map[string]string{{{"subnet": n.pods.String()}}},
			},
		}},
	}, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(l.cniConfig(), "10-stowage.conflist"), config, 0o644)
}

func (n network) healthz() string {
	return "http://127.0.0.1:" + strconv.Itoa(int(n.healthzPort)) + "/healthz"
}
