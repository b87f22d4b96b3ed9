// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hold

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// checkpointFile is the kubelet's (kubeletDeviceManagerCheckpoint in k8s.io/kubernetes/pkg/kubelet/cm/devicemanager), beside
// the sockets of device plugins.
const checkpointFile = "kubelet_internal_checkpoint"

// maxCheckpoint bounds what is read. A container with 16 devices takes about 1.5 KiB.
const maxCheckpoint = 16 << 20

// Checkpoint is what the kubelet's device manager remembers: which containers have which devices, ordinary init containers
// included, which its PodResources service leaves out. Of a pod that has ended the kubelet forgets it only when it allocates
// the next device.
type Checkpoint struct {
	entries []checkpointEntry
}

type checkpointEntry struct {
	PodUID       types.UID
	ResourceName string
	// DeviceIDs by NUMA node. One on several nodes is in several lists.
	DeviceIDs map[int64][]string
}

// ReadCheckpoint reads the file in the kubelet's folder for device plugins. A file that is not there is an error: a kubelet that
// has a device plugin has written one. The checksum is not looked at: the kubelet's way to compute it follows its types in Go.
func ReadCheckpoint(dir string) (*Checkpoint, error) {
	path := filepath.Join(dir, checkpointFile)
	file, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read the kubelet's checkpoint: %w", err)
	}
	defer file.Close()
	data, err := io.ReadAll(io.LimitReader(file, maxCheckpoint+1))
	if err != nil {
		return nil, fmt.Errorf("read the kubelet's checkpoint: %w", err)
	}
	if len(data) > maxCheckpoint {
		return nil, fmt.Errorf("the kubelet's checkpoint %s is larger than %d bytes", path, maxCheckpoint)
	}
	checkpoint, err := decodeCheckpoint(data)
	if err != nil {
		return nil, fmt.Errorf("the kubelet's checkpoint %s: %w", path, err)
	}
	return checkpoint, nil
}

// decodeCheckpoint refuses what is not of that form rather than finding nothing in it: nobody having a device is what frees it.
func decodeCheckpoint(data []byte) (*Checkpoint, error) {
	var content struct {
		Data *struct {
			PodDeviceEntries  []checkpointEntry
			RegisteredDevices map[string][]string
		}
	}
	if err := json.Unmarshal(data, &content); err != nil {
		return nil, err
	}
	if content.Data == nil || content.Data.RegisteredDevices == nil {
		return nil, errors.New("it is not of the form that this agent knows: Data.RegisteredDevices is missing")
	}
	for i, e := range content.Data.PodDeviceEntries {
		if e.PodUID == "" || e.ResourceName == "" || e.DeviceIDs == nil {
			return nil, fmt.Errorf("it is not of the form that this agent knows: Data.PodDeviceEntries[%d] lacks PodUID, ResourceName or DeviceIDs",
				i)
		}
	}
	return &Checkpoint{entries: content.Data.PodDeviceEntries}, nil
}

// PodsWith are the pods that have the device, each once, in the kubelet's order.
func (c *Checkpoint) PodsWith(device ledger.PluginDevice) (pods []types.UID) {
	for _, e := range c.entries {
		if e.ResourceName != device.Resource || slices.Contains(pods, e.PodUID) {
			continue
		}
		for _, ids := range e.DeviceIDs {
			if slices.Contains(ids, device.ID) {
				pods = append(pods, e.PodUID)
				break
			}
		}
	}
	return pods
}
