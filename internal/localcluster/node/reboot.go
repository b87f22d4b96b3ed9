// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"time"

	"stowage.dev/stowage/internal/localcluster/node/enclosure"
)

// bootIDFile is where the kernel says which boot this is.
const bootIDFile = "/proc/sys/kernel/random/boot_id"

// newBootID lets the programs of the node see another boot than before: the kubelet tells of one by the node's status and an event.
func newBootID(l layout) (enclosure.Bind, error) {
	var b [16]byte
	_, _ = rand.Read(b[:]) // which never fails
	bind := enclosure.Bind{Source: l.path("boot-id"), Target: bootIDFile}
	text := fmt.Sprintf("%x-%x-%x-%x-%x\n", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
	if err := os.WriteFile(bind.Source, []byte(text), 0o644); err != nil {
		return bind, fmt.Errorf("writing the node's boot ID: %w", err)
	}
	return bind, nil
}

// Reboot ends all that runs on the node at once, as a loss of power does, takes away what is not on its disk, does something while
// the node is off, and starts the node again, with another boot ID. It waits until the node is Ready. The agent, and the GPUs'
// boot, are the caller's matter.
func (n *Node) Reboot(ctx context.Context, off func() error) (err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	defer func() {
		if err != nil {
			err = fmt.Errorf("rebooting node %s: %w", n.name, err)
		}
	}()
	begin := time.Now()
	if n.agent != nil {
		err = n.agent.Kill()
		n.agent = nil
	}
	if err := errors.Join(err, n.kubelet.Kill(), n.containerd.Kill(), n.enclosure.Stop()); err != nil {
		return err
	}
	for _, volatile := range []string{n.layout.path("run"), n.layout.cdi(), n.layout.devices()} {
		if err := os.RemoveAll(volatile); err != nil {
			return err
		}
	}
	if err := errors.Join(n.layout.make(), off()); err != nil {
		return err
	}
	if err := n.enclose(ctx); err != nil {
		return err
	}
	if err := n.startContainerd(ctx); err != nil {
		return err
	}
	if err := n.startKubelet(ctx); err != nil {
		return err
	}
	return n.waitReady(ctx, begin)
}
