// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package confine starts a program as a process of the host that outlives the agent: in a cgroup beside those of the kubelet, in the
// namespaces of the host, and with few of root's rights. It does on a host without systemd what transient units do on others.
//
// There are two sides. The agent makes the cgroup (Group.Make), runs its own program again as a helper (Start), and ends what is
// in the cgroup (Group.Kill). The helper (Become) enters the cgroup first, takes from itself what the program has no use for, and
// becomes the program: no process of the agent's stays. The cgroup's name is all by which the next agent finds it. What the
// program is good for is not known here.
package confine
