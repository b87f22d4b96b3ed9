// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command scheduler is kube-scheduler with this module's plugins. It takes kube-scheduler's command line and
// configuration file.
package main

import (
	"os"

	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"          // --logging-format=json
	_ "k8s.io/component-base/metrics/prometheus/clientgo" // client-go's metrics
	_ "k8s.io/component-base/metrics/prometheus/version"  // the build's version as a metric
)

func main() {
	os.Exit(cli.Run(newCommand()))
}
