// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"stowage.dev/stowage/internal/localcluster"
)

// Where the manifests and their two scheduler configurations are, from this folder.
const (
	manifests       = "../../manifests"
	secondScheduler = manifests + "/scheduler-config/second-scheduler.yaml"
	secondProfile   = manifests + "/scheduler-config/second-profile.yaml"
)

// cluster is the control plane that all tests of the package share.
var cluster *localcluster.Cluster

func TestMain(m *testing.M) {
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	stopRecording, err := recorded.start()
	if err != nil {
		fmt.Fprintln(os.Stderr, "recording what is asked of API servers:", err)
		return 1
	}
	defer stopRecording()
	options := recorded.of(localcluster.Options{
		Progress: os.Stderr,
		// Nobody renews the leases of nodes made by hand.
		ControllerManagerArgs: []string{"--node-monitor-grace-period=2h"},
	})
	return localcluster.RunTests(judged{m}, options, func(c *localcluster.Cluster) {
		cluster = c
		if err := c.Apply(context.Background(), filepath.Join(manifests, "base/access"), filepath.Join(manifests, "kubectl"),
			filepath.Join(manifests, "overlays/map/reader"), filepath.Join(manifests, "overlays/map/account.yaml")); err != nil {
			panic(fmt.Sprintf("applying what every test needs: %v", err))
		}
	})
}

// schedulerIdentity connects as the ServiceAccount of the scheduler, with the rights that the manifests grant.
var schedulerIdentity = sync.OnceValues(func() (*rest.Config, error) {
	account := localcluster.SchedulerServiceAccount
	return cluster.ServiceAccountConfig(context.Background(), account.Namespace, account.Name, nil)
})
