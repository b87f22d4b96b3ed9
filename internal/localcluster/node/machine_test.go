// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package node_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

// state is what a node could change on a machine.
type state struct {
	Mounts   []string
	Links    []string
	Routes   []string
	Cgroups  []string // of nodes
	Programs []string // of nodes: shims, janitors, containers' processes
	Settings map[string]string
	Folders  map[string]bool
}

// settings are those that kubelet and CNI plugins change on a machine of their own.
var settings = []string{
	"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
	"kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes", "net/ipv4/ip_forward",
}

var folders = []string{
	"/var/lib/kubelet", "/var/lib/cni", "/run/containerd", "/run/cdi", "/run/netns", "/var/log/containers", "/var/log/pods",
	"/opt/containerd", "/usr/libexec/kubernetes",
}

func machine(t *testing.T) state {
	t.Helper()
	s, err := readMachine()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wantUnchanged waits, as the kernel removes links in the background.
func wantUnchanged(t *testing.T, before state) {
	t.Helper()
	var diff string
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if diff = cmp.Diff(before, machine(t)); diff == "" {
			return
		}
	}
	t.Errorf("the machine is not as it was (-before +after):\n%s", diff)
}

func readMachine() (state, error) {
	s := state{Settings: map[string]string{}, Folders: map[string]bool{}}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return s, err
	}
	s.Mounts = strings.Split(string(mounts), "\n")
	links, err := netlink.LinkList()
	if err != nil {
		return s, err
	}
	for _, link := range links {
		s.Links = append(s.Links, link.Attrs().Name)
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return s, err
	}
	for _, route := range routes {
		s.Routes = append(s.Routes, route.String())
	}
	hierarchies, err := enclosure.Hierarchies()
	if err != nil {
		return s, err
	}
	for _, root := range hierarchies {
		found, err := filepath.Glob(filepath.Join(root, fmt.Sprintf("stowage-%d-*", os.Getpid())))
		if err != nil {
			return s, err
		}
		s.Cgroups = append(s.Cgroups, found...)
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return s, err
	}
	for _, path := range commands {
		command, err := os.ReadFile(path)
		if err != nil {
			continue // ended meanwhile
		}
		for _, of := range []string{"containerd", "janitor", "/probe", "kubelet\x00"} {
			if strings.Contains(string(command), of) && !strings.Contains(string(command), "go\x00") {
				s.Programs = append(s.Programs, strings.ReplaceAll(string(command), "\x00", " "))
			}
		}
	}
	slices.Sort(s.Programs)
	for _, name := range settings {
		value, err := os.ReadFile(filepath.Join("/proc/sys", name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return s, err
		}
		s.Settings[name] = string(value)
	}
	for _, path := range folders {
		_, err := os.Stat(path)
		s.Folders[path] = err == nil
	}
	return s, nil
}
