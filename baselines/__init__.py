"""The methods that ENTED is compared with, one file each; conf/model/<name>.yaml has their settings."""
