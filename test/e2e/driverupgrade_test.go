// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/test/lab"
)

// The driver is upgraded under a running pod, asked for in each of the three ways, and by nobody: a package replaces the library under the
// agent, which has loaded it. The pod keeps running, one that ends meanwhile goes, one that comes waits. The agent, which has let the
// driver go, comes back as a new process, and the pod that waits runs.
func TestADriverUpgradeUnderARunningPod(t *testing.T) {
	namespace := newNamespace(t)
	all := devices(t)
	runs := startPod(t, namespace, "runs", 1)
	runs.check()
	was := runs.container()
	before := loadedDriver(t)
	log := theNode.LogFile("agent")

	for _, upgrade := range []struct {
		way, says, version string
		ask, end           func() error
		// replaced: the agent steps aside by itself, and comes back by itself.
		replaced bool
	}{
		{
			way: "label", says: "nvidia.com/gpu.deploy.dcgm: paused-for-driver-upgrade", version: "999.1.2",
			ask: func() error {
				return patchNode(`{"metadata":{"labels":{"nvidia.com/gpu.deploy.dcgm":"paused-for-driver-upgrade"}}}`)
			},
			end: func() error { return patchNode(`{"metadata":{"labels":{"nvidia.com/gpu.deploy.dcgm":"true"}}}`) },
		},
		{
			way: "annotation", says: `stowage.dev/release-driver: "new firmware"`, version: "999.1.3",
			ask: func() error {
				return patchNode(`{"metadata":{"annotations":{"stowage.dev/release-driver":"new firmware"}}}`)
			},
			end: func() error { return patchNode(`{"metadata":{"annotations":{"stowage.dev/release-driver":null}}}`) },
		},
		{
			way: "command", says: "the old driver again", version: before,
			ask: func() error { return release("--for=the old driver again") },
			end: func() error { return release("--end") },
		},
		{
			way: "package", says: "libnvidia-ml.so.1", version: "999.1.4", replaced: true,
			ask: func() error { return cluster.InstallDriver(nodeName, "999.1.4") },
			end: func() error { return nil },
		},
	} {
		ends := startPod(t, namespace, "ends-"+upgrade.way, 1)
		pid, logged := theNode.Agent().Pid(), logSize(t, log)
		mustDo(t, upgrade.ask())
		reason := "DriverReleased"
		if upgrade.replaced {
			reason = "DriverReplaced"
		}
		for _, device := range all {
			waitTaints(t, device, "gpu.nvidia.com/not-ready="+reason+":NoSchedule")
		}
		waitDescribed(t, "GPUsReady", "False", reason, upgrade.says)
		poll(t, "no agent has the driver open", func(context.Context) error { return closed() })
		ends.delete()
		hardware(t, &nvmlsim.UnloadDriver{})
		next := pod{t: t, namespace: namespace, name: "next-" + upgrade.way}
		createPod(t, namespace, next.name, 1)
		if _, err := cluster.WaitForPods(t.Context(), namespace, []string{next.name}, "refused", podTimeout, lab.Unschedulable); err != nil {
			t.Fatal(err)
		}
		if !upgrade.replaced {
			mustDo(t, cluster.InstallDriver(nodeName, upgrade.version))
		}
		hardware(t, &nvmlsim.LoadDriver{Version: upgrade.version})
		if lines := linesSince(t, log, logged, `"Starting"`); len(lines) > 0 && !upgrade.replaced {
			t.Errorf("%s: the agent has begun anew while the driver is released: %q", upgrade.way, lines)
		}

		mustDo(t, upgrade.end())
		poll(t, "the agent publishes driver "+upgrade.version, func(context.Context) error {
			if now := driverVersion(t); !sameVersion(now, upgrade.version) {
				return fmt.Errorf("it is %s", now)
			}
			return nil
		})
		for _, device := range all {
			waitTaints(t, device)
		}
		waitDescribed(t, "GPUsReady", "True", fmt.Sprintf("%d of %d GPUs can be used", gpuCount, gpuCount))
		next.waitRunning()
		next.check()
		if lines := linesSince(t, log, logged, `"Starting"`); len(lines) != 1 {
			t.Errorf("%s: want one new process, the log has %q", upgrade.way, lines)
		}
		if now := theNode.Agent().Pid(); now != pid {
			t.Errorf("%s: the agent is process %d, and was %d", upgrade.way, now, pid)
		}
		if events := refusals(t, namespace); len(events) > 0 {
			t.Errorf("%s: the kubelet was refused, and tries again only after a minute: %q", upgrade.way, events)
		}
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
		mustDo(t, err)
		library := cluster.Library(nodeName)
		if !strings.Contains(string(maps), library+"\n") || strings.Contains(string(maps), library+" (deleted)") {
			t.Errorf("%s: the agent has not loaded %s, or one before: %s", upgrade.way, library, maps)
		}
		next.delete()
		runs.checkAgain()
		if now := runs.container(); now.RestartCount != 0 || now.ContainerID != was.ContainerID || now.State.Running == nil {
			t.Errorf("%s: the container of the pod that runs: %+v", upgrade.way, now)
		}
	}
}

// refusals are the kubelet's events about claims that it could not have prepared.
func refusals(t *testing.T, namespace string) (messages []string) {
	t.Helper()
	failed := metav1.ListOptions{FieldSelector: "reason=FailedPrepareDynamicResources"}
	events, err := cluster.AdminClient().CoreV1().Events(namespace).List(t.Context(), failed)
	mustDo(t, err)
	for _, event := range events.Items {
		messages = append(messages, event.Message)
	}
	return messages
}

func mustDo(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func patchNode(patch string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, err := cluster.AdminClient().CoreV1().Nodes().Patch(ctx, nodeName, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}

// release runs the agent's command on the node.
func release(args ...string) error { return releaseIn(theNode, args...) }

func releaseIn(n *node.Node, args ...string) error {
	args = append([]string{"release-driver", "--state-dir=" + n.StateDir()}, args...)
	out, err := exec.Command(unconfinedAgent, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("node-agent %v: %w: %s", args, err, out)
	}
	return nil
}

// closed returns an error while an agent of the node has the driver open.
func closed() error {
	file, err := os.OpenFile(filepath.Join(theNode.StateDir(), "driver", "lock"), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB), file.Close())
}

// driverVersion is what all slices of the node say.
func driverVersion(t *testing.T) (version string) {
	t.Helper()
	ofNode := metav1.ListOptions{FieldSelector: resourceapi.ResourceSliceSelectorNodeName + "=" + nodeName}
	list, err := cluster.AdminClient().ResourceV1().ResourceSlices().List(t.Context(), ofNode)
	mustDo(t, err)
	for _, slice := range list.Items {
		for _, device := range slice.Spec.Devices {
			if v := device.Attributes["driverVersion"].VersionValue; v == nil || version != "" && *v != version {
				return fmt.Sprintf("%v beside %q", v, version)
			} else {
				version = *v
			}
		}
	}
	return version
}

// loadedDriver is the version of the kernel's driver.
func loadedDriver(t *testing.T) string {
	t.Helper()
	result, err := nvmlsim.Control(t.Context(), controlSocket(), &nvmlsim.ShowState{})
	mustDo(t, err)
	if v := result.State.Driver.Version; v != "" {
		return v
	}
	return driverOfProfile(t)
}

func driverOfProfile(t *testing.T) string {
	t.Helper()
	p, err := nvmlsim.LoadProfile(strings.TrimPrefix(profile, "sim:"))
	mustDo(t, err)
	return p.System.DriverVersion
}

// sameVersion compares a driver's version with a published one, which has no leading zeros.
func sameVersion(published, version string) bool {
	return published == version || published == strings.ReplaceAll(version, ".0", ".")
}
