// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// connect fills in GPU.NVLink: the peers of each GPU and the domain it is in.
func connect(ctx context.Context, gpus []*found) error {
	for _, f := range gpus {
		if len(f.links) > 0 {
			f.gpu.NVLink = &NVLink{Version: f.links[0].Version, Links: len(f.links), Clique: f.clique()}
		}
	}
	for i, a := range gpus {
		for _, b := range gpus[i+1:] {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("discover NVLinks of %s: %w", a.gpu.Name, err)
			}
			if links := linksBetween(a, b); links > 0 {
				a.gpu.NVLink.Peers = append(a.gpu.NVLink.Peers, Peer{Name: b.gpu.Name, Links: links})
				b.gpu.NVLink.Peers = append(b.gpu.NVLink.Peers, Peer{Name: a.gpu.Name, Links: links})
			}
		}
	}
	nameDomains(gpus)
	return nil
}

// linksBetween counts the links that carry traffic between two GPUs: those
// that end at the other GPU or, for GPUs on switches, those that lead there.
func linksBetween(a, b *found) int {
	if direct := a.linksTo(b); direct > 0 && b.linksTo(a) > 0 {
		return direct
	}
	switched := min(a.switchedLinks(), b.switchedLinks())
	if switched == 0 {
		return 0
	}
	// Two GPUs on switches need not reach each other: a fabric manager may have
	// put them into different partitions, or one of them into none.
	switch reaches, err := a.device.ReachesOverNVLink(b.device); {
	case errors.Is(err, nvml.ErrNotSupported):
	case err != nil:
		a.warn("NVLink to %s unknown: %v", b.gpu.Name, err)
		return 0
	case !reaches:
		return 0
	}
	return switched
}

func (f *found) linksTo(other *found) int {
	n := 0
	for _, l := range f.links {
		if l.Remote == nvml.RemoteGPU && l.RemotePCIBusID == other.gpu.PCIBusID {
			n++
		}
	}
	return n
}

// switchedLinks counts the links to switches. Where these are hidden, as from
// virtual machines, the remote type is unknown.
func (f *found) switchedLinks() int {
	n := 0
	for _, l := range f.links {
		if l.Remote == nvml.RemoteSwitch || l.Remote == nvml.RemoteUnknown {
			n++
		}
	}
	return n
}

// clique names the fabric over several nodes that the GPU has joined, if any.
func (f *found) clique() string {
	switch {
	case f.fabric == nil || f.fabric.ClusterUUID == "":
		return ""
	case f.fabric.State != "Completed":
		f.warn("NVLink fabric not joined: its state is %s", f.fabric.State)
		return ""
	case f.fabric.Err != nil:
		f.warn("NVLink fabric not joined: %v", f.fabric.Err)
		return ""
	}
	return fmt.Sprintf("%s.%d", f.fabric.ClusterUUID, f.fabric.CliqueID)
}

// nameDomains gives GPUs that are connected, directly or over others, one name.
// GPUs come in order of their addresses: the first of a domain names it.
func nameDomains(gpus []*found) {
	byName := make(map[string]*found, len(gpus))
	for _, f := range gpus {
		byName[f.gpu.Name] = f
	}
	var spread func(f *found, domain string)
	spread = func(f *found, domain string) {
		if f.gpu.NVLink.Domain != "" {
			return
		}
		f.gpu.NVLink.Domain = domain
		for _, peer := range f.gpu.NVLink.Peers {
			spread(byName[peer.Name], domain)
		}
	}
	for _, f := range gpus {
		if link := f.gpu.NVLink; link != nil && link.Clique != "" {
			link.Domain = link.Clique
		}
	}
	for _, f := range gpus {
		if f.gpu.NVLink != nil && len(f.gpu.NVLink.Peers) > 0 {
			spread(f, "nvlink-"+strings.TrimPrefix(f.gpu.Name, "gpu-"))
		}
	}
}
