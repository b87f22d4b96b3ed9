// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package stepaside

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/agent/durable"
)

// Annotation of a Node asks its agent for the driver. Its value says what for; it ends with the annotation, or with the value false.
const Annotation = "stowage.dev/release-driver"

// The GPU operator's labels of a Node say where its parts run. k8s-driver-manager pauses those that have the driver open
// before it unloads the driver (paused-for-driver-upgrade, or with the value of before in front of it), mig-manager before
// it changes partitions (paused-for-mig-change).
const (
	pauseLabels = "nvidia.com/gpu.deploy."
	paused      = "paused-for-"
)

// nodesRequests says what the Node asks for, in an order that stays.
func nodesRequests(node *corev1.Node) (requests []string) {
	if value, asked := node.Annotations[Annotation]; asked && value != "false" {
		requests = append(requests, fmt.Sprintf("the Node has the annotation %s: %q", Annotation, shorten(value)))
	}
	// One is enough: the operator pauses all of its parts at once, in no order.
	for _, label := range slices.Sorted(maps.Keys(node.Labels)) {
		if value := node.Labels[label]; strings.HasPrefix(label, pauseLabels) && strings.Contains(value, paused) {
			return append(requests, fmt.Sprintf("the GPU operator pauses who has the driver open: the Node has the label %s: %s", label, value))
		}
	}
	return requests
}

// maxWords, in bytes, is as much as others are told of what the driver is wanted for: each refused claim, and each device
// to the kubelet, which takes messages of 4 MiB. An annotation may have 256 KiB.
const maxWords = 256

func shorten(words string) string {
	if len(words) <= maxWords {
		return words
	}
	return strings.ToValidUTF8(words[:maxWords], "") + "…"
}

// request is what the command writes.
type request struct {
	// For says what the driver is wanted for.
	For   string    `json:"for,omitempty"`
	Since time.Time `json:"since"`
}

func requestPath(dir string) string { return filepath.Join(dir, "request.json") }

// commandsRequest says what the command asks for; empty if it does not. One that cannot be read stands: who has written it relies on it.
func commandsRequest(dir string) string {
	data, err := durable.OS{}.ReadFile(requestPath(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	var r request
	if err == nil {
		err = json.Unmarshal(data, &r)
	}
	switch {
	case err != nil:
		return fmt.Sprintf("node-agent release-driver asks for it, and what it has written cannot be read: %v", err)
	case r.For != "":
		return fmt.Sprintf("node-agent release-driver asks for it since %s: %s", r.Since.UTC().Format(time.RFC3339), shorten(r.For))
	}
	return "node-agent release-driver asks for it since " + r.Since.UTC().Format(time.RFC3339)
}

// What the Node asked for is kept for an agent that starts while the API server is away.

func notePath(dir string) string { return filepath.Join(dir, "node.json") }

func note(dir string, requests []string) error {
	data, err := json.Marshal(requests)
	if err != nil {
		return err
	}
	return change(dir, func() error {
		if len(requests) == 0 {
			return durable.Remove(durable.OS{}, notePath(dir))
		}
		return durable.WriteFile(durable.OS{}, notePath(dir), data, 0o600)
	})
}

func noted(dir string) (requests []string) {
	data, err := durable.OS{}.ReadFile(notePath(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(data, &requests)
	}
	if err != nil {
		return []string{fmt.Sprintf("the Node asked for it when it was last read, and what was noted of that cannot be read: %v", err)}
	}
	return requests
}

// What an agent waits for is for the command to tell. It is a hint: where it cannot be written nothing else is lost.

func waitsPath(dir string) string { return filepath.Join(dir, "waits-for") }

func waitsFor(dir, what string) {
	// It is said each second for as long as something hangs, which is no reason to write as often.
	if said, err := (durable.OS{}).ReadFile(waitsPath(dir)); err == nil && string(said) == what {
		return
	}
	_ = change(dir, func() error {
		if what == "" {
			return durable.Remove(durable.OS{}, waitsPath(dir))
		}
		return durable.WriteFile(durable.OS{}, waitsPath(dir), []byte(what), 0o600)
	})
}

// change does one thing to the folder at a time: another agent of the node, and the command, write there, too.
func change(dir string, do func() error) error {
	if err := (durable.OS{}).MkdirAll(dir, 0o700); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), lockTimeout)
	defer cancel()
	unlock, err := durable.Lock(ctx, filepath.Join(dir, "writing"))
	if err != nil {
		return err
	}
	defer unlock()
	return do()
}

// lockTimeout is more than anybody keeps a lock for who writes, or who looks whether the driver is open.
const lockTimeout = 5 * time.Second
